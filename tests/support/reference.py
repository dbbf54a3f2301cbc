"""The pages that are made from the code and from other pages.

python -m tests.support.reference        # writes docs/reference.md and llms.txt anew
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tests.support.commands import ROOT
from trainer.config import keys
from trainer.config.grammar import Key, parse
from trainer.config.sections.section import Excludes, Needs, Only
from trainer.config.sections.trainer import TrainerSection

REFERENCE, LLMS = ROOT / "docs" / "reference.md", ROOT / "llms.txt"
HEAD = "| key | type | default | meaning |\n| --- | --- | --- | --- |"


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("None:", "null:")


def type_of(annotation: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(arguments[0])
    if origin in (Union, types.UnionType):
        kinds = [type_of(one) for one in arguments if one is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return ", ".join(f'`"{one}"`' for one in arguments)
    if origin is list:
        return f"list of {type_of(arguments[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "section"
    names = {int: "whole number", float: "number", str: "text", bool: "true, false", Any: "number"}
    return names[annotation]


def bounds(metadata: list[Any]) -> str:
    """Return the limits of a number in words."""
    signs = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
    limits = [
        f"{sign} {getattr(mark, kind.__name__.lower()):,g}"
        for mark in metadata
        for kind, sign in signs.items()
        if isinstance(mark, kind)
    ]
    return f" {', '.join(limits)}" if limits else ""


def default_of(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return ""
    plain = {None: "", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return plain[value]
    return f"`{value!r}`".replace("'", '"')


def marks_of(field: FieldInfo) -> Iterator[str]:
    for mark in field.metadata:
        if isinstance(mark, Only):
            yield f"For {', '.join(f'`{task}`' for task in mark.tasks)}."
        elif isinstance(mark, Needs):
            yield f"Needs {mark.condition}."
        elif isinstance(mark, Excludes):
            yield f"Not with `{mark.other}`."


def own_sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the sections of `trainer`, and those in them, by their dotted path."""
    found: list[tuple[str, type[BaseModel]]] = [("trainer", TrainerSection)]
    for path, model in found:
        yield path, model
        for name, field in model.model_fields.items():
            for kind in (field.annotation, *get_args(field.annotation)):
                for one in (kind, *get_args(kind)):
                    section = (f"{path}.{name}", one)
                    if (
                        isinstance(one, type)
                        and issubclass(one, BaseModel)
                        and section not in found
                    ):
                        found.append(section)


def own_rows(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        words = one_line(" ".join([field.description or "", *marks_of(field)]))
        kind = type_of(field.annotation) + bounds(field.metadata)
        yield f"| `{name}` | {kind} | {default_of(field)} | {words} |"


def facts(key: Key) -> Iterator[str]:
    """Yield what a row of a key table says of a key."""
    if key.now:
        yield f"Old name of `{key.now}`."
    if key.refused:
        yield f"Refused: {key.refused}."
    if key.idle:
        yield f"No effect: {key.idle}."
    if key.instead:
        effect = "refused" if key.changes_numbers else "no effect"
        yield f"Only `deepspeed`; {effect} elsewhere: {key.instead}."
    if key.needs:
        yield f"Needs {key.needs}."
    if key.excludes:
        yield f"Not with `{key.excludes}`."
    if key.differs:
        yield f"Default differs from DeepSpeed's: {key.differs}."


def table(found: dict[str, Key], below: str) -> Iterator[str]:
    """Yield the table of the keys of one section."""
    yield from ("", HEAD)
    for path, key in found.items():
        section, _, name = path.rpartition(".")
        if section == below and key.kind != "section":
            kind = key.expected.replace("|", "\\|")
            default = "" if key.default is None else f"`{key.default}`"
            if key.default is None and key.needed:
                default = "required"
            yield f"| `{name}` | {kind} | {default} | {one_line(' '.join(facts(key)))} |"


def reference() -> str:
    """Return docs/reference.md."""
    lines = [
        "# All keys",
        "",
        "Every key that the config reader knows, by section. The tables are those of the reader itself, written out by",
        "`python -m tests.support.reference`. How configs work: [configs.md](configs.md).",
        "",
        "## The section `trainer`",
    ]
    for path, model in own_sections():
        doc = one_line(model.__doc__ or "") if model.__doc__ != BaseModel.__doc__ else ""
        lines += ["", f"### `{path}`", "", *([doc, ""] if doc else []), HEAD, *own_rows(model)]
    lines += ["", "## DeepSpeed's keys", "", "### Top level", *table(keys.KEYS, "")]
    for path, key in keys.KEYS.items():
        if key.kind == "section":
            body = list(table(keys.KEYS, path))
            lines += ["", f"### `{path}`", "", one_line(" ".join(facts(key)))]
            lines += body if len(body) > 2 else []
    for title, name in (("Optimizers", "optimizers"), ("Schedulers", "schedulers")):
        text = (ROOT / f"trainer/config/{name}.txt").read_text(encoding="utf-8")
        found = parse(text)
        lines += [
            "",
            f"## {title}",
            "",
            f"The keys of `{name[:-1]}.params`, by `{name[:-1]}.type`.",
        ]
        for kind, key in found.items():
            if key.kind == "section":
                body = list(table(found, kind))
                lines += ["", f"### {kind}", "", one_line(" ".join(facts(key)))]
                lines += body if len(body) > 2 else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).replace("..", ".") + "\n"


def llms() -> str:
    """Return llms.txt (llmstxt.org): what the project is, and each page with its first sentence."""
    index = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    summary = one_line(readme.split("\n\n")[1])
    lines = [
        "# Meshloom",
        "",
        f"> {summary}",
        "",
        "Commands, rules and a map for agents: [AGENTS.md](AGENTS.md).",
    ]
    for line in index.split("\nnav:\n")[1].splitlines():
        if match := re.fullmatch(r"  - ([^:#]+):", line):
            lines += ["", f"## {match[1]}", ""]
        elif match := re.fullmatch(r" +- (.+): (\S+\.md)", line):
            if line.startswith("  - ") and "## Start" not in lines:
                lines += ["", "## Start", ""]
            lines.append(f"- [{match[1]}]({match[2]}): {first_sentence(match[2])}")
    return "\n".join(lines) + "\n"


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's first paragraph, or its title if it begins otherwise."""
    title, *rest = (ROOT / page).read_text(encoding="utf-8").split("\n\n")
    for paragraph in rest:
        if paragraph[0].isupper() or paragraph[0] == "`":
            plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", one_line(paragraph))
            return re.split(r"(?<=\.)\s|:$", plain, maxsplit=1)[0].rstrip(".") + "."
    return title.strip("# ") + "."


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
    LLMS.write_text(llms(), encoding="utf-8")
