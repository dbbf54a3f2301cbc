"""`meshloom schema`: the JSON Schema of a config, made from the tables of keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.command import parser_of, reporting
from trainer.config.keys import KEYS, OPTIMIZERS, SCHEDULERS
from trainer.config.keys.key import DTYPES, FLAGS, Key, Table
from trainer.config.sections.trainer import TrainerSection
from trainer.storage import Json

EPILOG = """
for an editor, in a JSON config and in a YAML one:
  "$schema": "schema.json"
  # yaml-language-server: $schema=schema.json

It accepts every config that the reader accepts, and rejects unknown keys and values of a wrong
type. The reader checks more: numbers that contradict one another, patterns, lengths of lists.
"""
Schema = Json
COMMENTS: Schema = {"^(_|//)": {}}
"""Keys that are comments, in DeepSpeed's sections."""
NUMERIC: Schema = {"$ref": "#/$defs/number_in_quotes"}
FLAG: Schema = {"$ref": "#/$defs/flag"}
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    parser = parser_of(name, "Print the JSON Schema of a config, for editors.", EPILOG)
    parser.parse_args(arguments)
    print(text(), end="")
    return 0


def text() -> str:
    """Return the schema as the text of `trainer/config/schema.json`, which is in the wheel."""
    lines = json.dumps(schema(), indent=1, ensure_ascii=False)
    lines = re.sub(r",\n {3,}", ", ", lines)  # a line for each key
    return re.sub(r"\n(  (?=[]}])| {3,})", "", lines) + "\n"


def schema() -> Schema:
    """Return the schema of a config: draft 2020-12."""
    trainer = _lenient(TrainerSection.model_json_schema())
    sections = trainer.pop("$defs")
    made = _section(_properties(KEYS))
    made["properties"]["$schema"] = {"description": "The place of this schema."}
    made["properties"]["trainer"] = trainer
    for name, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        section = made["properties"][name]
        section["properties"] |= {"type": _types(types, name), "params": {"type": "object"}}
        section["allOf"] = _parameters(types)
    made["properties"]["optimizer"]["dependentRequired"] = {"params": ["type"]}
    typed = {"properties": {"type": {"type": "string"}}, "required": ["type"]}
    either = {"anyOf": [typed, {"properties": {"params": {"maxProperties": 0}}}]}
    made["properties"]["scheduler"]["dependentSchemas"] = {"params": either}
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Meshloom's config"}
    return top | made | {"$defs": sections | _shared()}


def _shared() -> Schema:
    """Return the definitions of the texts that the reader takes for a number or a truth value."""
    digits = r"^\s*[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?\s*$"
    return {
        "number_in_quotes": {"type": "string", "pattern": digits},
        "flag": {"anyOf": [{"type": "boolean"}, _any_case([*FLAGS]), {"enum": [0, 1]}]},
    }


def _section(properties: Schema) -> Schema:
    closed = {"patternProperties": COMMENTS, "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def _properties(table: Table, section: str = "") -> Schema:
    """Return the schemas of a section's keys, each with those below it."""
    inside = [path for path in table if path.rpartition(".")[0] == section]
    return {path.rpartition(".")[2]: _property(table, path) for path in inside}


def _property(table: Table, path: str) -> Schema:
    key = table[path]
    about: Schema = {"description": " ".join([f"{key.expected}.", *key.sentences()])}
    if key.refused or key.idle or key.now:
        about["deprecated"] = True
    if key.default is not None:
        about["default"] = key.default
    below = _properties(table, path)
    if key.refused or (key.kind == "any" and not below):
        return about  # a refused key is accepted if it is off
    kinds = [_section(below)] if below else _kinds(key)
    if path == "zero_optimization":
        kinds.append({"type": "boolean"})
    kinds += [{"const": "auto"}] * key.auto + [{"type": "null"}] * key.null
    return about | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


def _kinds(key: Key) -> list[Schema]:
    """Return the schemas of the values that `grammar.coerce` accepts."""
    if key.kind in ("int", "float"):
        low = "exclusiveMinimum" if key.above else "minimum"
        bounds = {low: key.low, "maximum": key.high}
        number = {"type": "integer" if key.kind == "int" else "number"}
        return [number | {name: it for name, it in bounds.items() if it is not None}, NUMERIC]
    if key.kind == "bool":
        return [FLAG]
    if key.kind == "dtype":
        return [_any_case([*DTYPES, *(f"torch.{name}" for name in DTYPES)])]
    if key.choices:
        return [{"enum": [*key.choices]}, _any_case(key.choices)]
    return [{"type": {"str": "string", "list": "array", "section": "object"}[key.kind]}]


def _any_case(words: Sequence[str]) -> Schema:
    """Return the schema of some words of letters, digits, "_" and ".", in any case."""

    def letter(one: str) -> str:
        return f"[{one.lower()}{one.upper()}]" if one.isalpha() else f"[{one}]"

    joined = "|".join("".join(map(letter, word)) for word in words)
    return {"type": "string", "pattern": f"^({joined})$"}


def _types(types: Mapping[str, Table], place: str) -> Schema:
    null: list[Schema] = [{"type": "null"}] * KEYS[f"{place}.type"].null
    own = [{"type": "string", "pattern": ":"}] * (place == "optimizer")  # a plug-in's
    return {"anyOf": [{"enum": [*types]}, _any_case([*types]), *own, *null]}


def _parameters(types: Mapping[str, Table]) -> list[Schema]:
    """Return the schemas of the parameters of each type of optimizer or scheduler."""
    cases = []
    for name, table in types.items():
        params = _section(_properties(table))
        then: Schema = {"properties": {"params": params}}
        if needed := [parameter for parameter, key in table.items() if key.needed]:
            params["required"] = needed
            then["required"] = ["params"]
        chosen = {"properties": {"type": _any_case([name])}, "required": ["type"]}
        cases.append({"if": chosen, "then": then})
    return cases


def _lenient(node: object) -> Any:
    """Return pydantic's schema with JSON Schema's names of bounds, and with numbers in quotes."""
    if isinstance(node, list):
        return [_lenient(part) for part in node]
    if not isinstance(node, dict):
        return node
    shown: Schema = {
        str(BOUNDS.get(name, name)): _lenient(part)
        for name, part in node.items()
        if not (name == "title" and isinstance(part, str))
        and not (name == "default" and isinstance(part, dict | list))
    }
    about: Schema = {}
    if isinstance(docstring := shown.get("description"), str):  # in Python's words
        shown["description"] = " ".join(docstring.split()).replace("None:", "null:")
    kind = shown.get("type")
    if kind in ("integer", "number", "boolean"):
        about = {name: shown.pop(name) for name in ("default", "description") if name in shown}
        shown = FLAG if kind == "boolean" else {"anyOf": [shown, NUMERIC]}
    return about | shown
