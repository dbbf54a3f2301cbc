"""The grammar of a table of keys, which keys.txt explains."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from trainer.config.keys.key import Excludes, Key, cast
from trainer.storage import Json


def parse(table: str) -> dict[str, Key]:
    """Parse a table; return its keys by their dotted path."""
    keys: dict[str, Key] = {}
    sections = [""]
    for line in re.sub(r"\n +", " ", table).splitlines():
        if not line or line.startswith("#"):
            continue
        names, values, *facts = line.split(" | ")
        given = _values(values)
        key = Key(**given, **_facts(facts, given["kind"]))
        if names.startswith("["):
            sections = names.strip("[]").split()
            keys.update(dict.fromkeys(sections, key))
            continue
        for section in sections:
            row = key.below(keys.get(section, key))
            keys.update({f"{section}.{name}".lstrip("."): row for name in names.split()})
    return keys


def _values(text: str) -> Json:
    typed = re.match(r"(?P<kind>\w+)(\[(?P<unit>[^]]+)\])?", text)
    assert typed is not None, text
    fields: dict[str, object] = {name: it for name, it in typed.groupdict().items() if it}
    for word in text[typed.end() :].split():
        if word in ("auto", "null", "needed"):
            fields[word] = True
        elif word.startswith("auto="):
            fields.update(auto=True, when_auto=json.loads(word.removeprefix("auto=")))
        elif match := re.fullmatch(r"(>=?)(.+)", word):
            fields.update(low=float(match[2]), above=match[1] == ">")
        elif match := re.fullmatch(r"(.+)\.\.(.+)", word):
            fields.update(low=float(match[1]), high=float(match[2]))
        else:
            fields["choices"] = tuple(word.split("|"))
    return fields


def _facts(facts: Sequence[str], kind: str) -> Json:
    fields: Json = {}
    for fact in facts:
        name, colon, text = fact.partition(": ")
        fields[name.replace(" ", "_")] = text if colon else True
    if "default" in fields:
        fields["default"] = json.loads(fields["default"])
    if "usual" in fields:
        fields["usual"] = tuple(cast(value, kind) for value in fields["usual"].split(", "))
    if "excludes" in fields:
        fields["excludes"] = Excludes(fields["excludes"])
    return fields
