"""Checks a config against a key table: unknown, wrong, removed keys, and those without effect."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainer.config.keys import RECOMPUTES
from trainer.config.keys.hints import misfit, unknown, useless
from trainer.config.keys.key import Key, Table, coerce, is_off
from trainer.errors import MOST_SHOWN, Problem, show
from trainer.storage import Json

COMMENTS = ("_", "//")
UNSAID = 'it has no "{}", and is off'
"""The reason why a section without its switch has no effect."""


@dataclass
class Checked:
    """The outcome of a check: values, coerced to their types, problems, and keys without effect."""

    values: Json = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)
    """Paths of keys that ask for something but have no effect here -> the reason."""

    @property
    def notes(self) -> list[str]:
        return [f"{place} has no effect here: {why}" for place, why in self.idle.items()]


def check(values: Json, table: Table, elsewhere: Sequence[str] = (), path: str = "") -> Checked:
    """Check the section at `path` and all below it; `elsewhere` are known keys outside the table.

    Keys that start with "_" or "//" are comments, as is "$schema", which is for editors. The
    returned values lack keys that have no effect, and removed keys that are off.
    """
    result = Checked()
    for name, value in values.items():
        if not name.startswith(COMMENTS) and f"{path}{name}" != "$schema":
            _check_one(result, name, value, table, elsewhere, f"{path}{name}")
    return result


def _check_one(
    result: Checked, name: str, value: object, table: Table, elsewhere: Sequence[str], place: str
) -> None:
    key = table.get(place)
    if key is None or "." in name:
        # finding similar keys takes time, and nobody reads more than the first few
        if len(result.problems) >= MOST_SHOWN:
            result.problems.append(unknown(place, value, ()))
            return
        idle = {path: why for path, why in useless(table).items() if RECOMPUTES not in path}
        result.problems.append(unknown(place, value, (*table, *elsewhere), idle))
        return
    whole = value
    if isinstance(value, dict) and any(known.startswith(f"{place}.") for known in table):
        below = check(value, table, elsewhere, f"{place}.")
        result.problems.extend(below.problems)
        result.idle.update({} if key.idle else below.idle)
        if value and not (below.values or key.idle or key.refused):
            return  # each of its keys has a note, or asks for nothing
        value = {**below.idle, **below.values} if key.idle else below.values
    elif not (key.refused or (isinstance(value, bool) and place == "zero_optimization")):
        try:
            value = coerce(value, key)
        except ValueError:
            result.problems.append(misfit(place, value, key))
            return
    if key.refused:
        with suppress(ValueError):
            whole = coerce(whole, key)
        if whole not in key.usual if key.usual else not _is_off(whole, place, table):
            result.problems.append(_refusal(place, whole, key))
        elif isinstance(value, dict) and value and "enabled" not in value:
            result.idle[place] = UNSAID.format("enabled")
    elif not key.idle:
        result.values[name] = value
    elif key.asks(value):
        result.idle[place] = key.idle


def _refusal(place: str, value: object, key: Key) -> Problem:
    why, _, hint = key.refused.partition(". ")
    kind = "section" if key.kind == "section" else "key"
    return Problem(place, f"saw {show(value)}", f"no such {kind}: {why}", f"{hint}.")


def _is_off(value: Any, place: str, table: Table) -> bool:
    """Return True if a refused key is off; in DeepSpeed, a section without "enabled" is off."""
    named = isinstance(value, dict) and f"{place}.enabled" in table
    return is_off({"enabled": False, **value} if named else value)
