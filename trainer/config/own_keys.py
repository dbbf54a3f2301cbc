"""The keys of the `trainer` section as rows: a field's mark, type, default and docstring."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.config.keys.key import Key
from trainer.config.sections.section import Section, mark_of
from trainer.config.sections.trainer import TrainerSection
from trainer.errors import Problem, show
from trainer.plugins import honours, is_recipe, keys_of

_NAMES = {int: "whole number", float: "number", str: "text", bool: "true, false", Any: "number"}
_KINDS = {int: "int", float: "float", Any: "float", bool: "bool", str: "str"}


def _sections(field: FieldInfo) -> list[type[Section]]:
    """List the sections that a field's type names: its own, or that of the items of a list."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def sections_of(model: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield (path, section) of all sections inside `model`, each before those inside it."""
    for name, field in model.model_fields.items():
        for section in _sections(field):
            yield f"{path}.{name}", section
            yield from sections_of(section, f"{path}.{name}")


def _keys(model: type[Section], path: str) -> Iterator[tuple[str, Key]]:
    for name, field in model.model_fields.items():
        yield f"{path}.{name}", _key(field)
        for section in _sections(field):
            yield from _keys(section, f"{path}.{name}")


def _key(field: FieldInfo) -> Key:
    default = None if field.is_required() or isinstance(field.default, Section) else field.default
    return replace(
        mark_of(field),
        kind="section" if _sections(field) else _kind(field.annotation),
        words=_words(field.annotation) + _bounds(field.metadata),
        null=type(None) in get_args(field.annotation),
        needed=field.is_required(),
        default=default,
        about=field.description or "",
    )


def _leaves(annotation: object) -> Iterator[Any]:
    """Yield the types that a type is made of, without the values of literals."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        yield from _leaves(parts[0])
    elif origin is dict:
        yield dict
    elif origin is Literal or not parts:
        yield str if origin is Literal else annotation
    else:
        for part in parts:
            yield from _leaves(part)


def _kind(annotation: object) -> str:
    """Return the kind of the key's numbers, or else of its first type."""
    kinds = [_KINDS.get(leaf, "section") for leaf in _leaves(annotation) if leaf is not type(None)]
    return next((kind for kind in kinds if kind in ("int", "float")), kinds[0])


def _words(annotation: Any) -> str:
    """Return a type in words."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        return _words(parts[0])
    if origin in (Union, types.UnionType):
        kinds = [_words(part) for part in parts if part is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return ", ".join(f'`"{part}"`' for part in parts)
    if origin is list:
        return f"list of {_words(parts[0])}"
    return _NAMES.get(annotation, "section")


def _bounds(metadata: list[object]) -> str:
    """Return the limits of a number in words."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        f"{sign} {getattr(mark, name):,g}"
        for mark in metadata
        for name, sign in signs.items()
        if hasattr(mark, name)
    ]
    return f" {', '.join(limits)}" if limits else ""


OWN_KEYS: dict[str, Key] = dict(_keys(TrainerSection, "trainer"))
"""Each key of the section and of those in it, by its dotted path."""


def honoured(path: str, recipe: str) -> bool:
    """Return True if a recipe honours a key of the section.

    A plug-in's recipe lists those of the model and of the data that it reads.
    """
    recipes = OWN_KEYS[path].recipes
    if is_recipe(recipe) and path.startswith(("trainer.model.", "trainer.data.")):
        return honours(recipe, path)
    return recipes is None or recipe in recipes.names or honours(recipe, path)


def unhonoured(section: TrainerSection, recipe: str) -> Iterator[Problem]:
    """Yield the problems of keys that are set, and that `recipe` does not honour."""
    default = TrainerSection()
    for path, key in OWN_KEYS.items():
        if honoured(path, recipe):
            continue
        value = _value(section, path)
        if value == _value(default, path):
            continue
        if is_recipe(recipe):
            known = f'a key that the recipe "{recipe}" lists in `keys`'
            yield Problem(path, f"saw {show(value)}", known, _of_keys(recipe))
            continue
        assert key.recipes is not None
        if key.recipes.accepts(value):
            continue
        other = f'the task "{key.recipes.names[0]}"; this one is "{recipe}"'
        if isinstance(value, Section):
            expected = key.recipes.accepted or other
            yield Problem(path, "saw keys", expected, "Set trainer.task.")
        else:
            yield Problem(path, f"saw {show(value)}", key.recipes.accepted or other)


def _of_keys(recipe: str) -> str:
    """Return the keys that a plug-in's recipe lists, as a hint."""
    keys = keys_of(recipe)
    return f"It lists {', '.join(keys)}." if keys else "It lists none."


def _value(section: Section, path: str) -> object:
    """Return the value at a key's path; None if a section around it is not there."""
    value: Any = section
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return value
