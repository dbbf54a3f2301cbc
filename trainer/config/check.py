"""Walks a config along a key table: unknown keys, wrong values, removed keys, keys without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainer.config.grammar import Key, coerce, is_off, misfit, show, unknown, useless
from trainer.config.keys import RECOMPUTES
from trainer.config.read import Json
from trainer.errors import MOST_SHOWN, Problem

UNSAID = 'it does not say "{}", and is off'
"""Why a section has no effect that is off where it is not switched on."""


@dataclass
class Checked:
    """The outcome of a walk: the values that go on, coerced to their types; the problems; what has no effect."""

    values: Json = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)
    """The path of each key that asks for something and has no effect here, and why."""

    @property
    def notes(self) -> list[str]:
        return [f"{place} has no effect here: {why}" for place, why in self.idle.items()]


def check(values: Json, table: Mapping[str, Key], elsewhere: Sequence[str] = (), path: str = "") -> Checked:
    """Check the section at `path` and all below it; `elsewhere` are known keys outside the table.

    Keys that start with "_" or "//" are comments. Keys without effect, and removed keys that are off, are left out.
    """
    found = Checked()
    for name, value in values.items():
        if not name.startswith(("_", "//")):
            _check_one(found, name, value, table, elsewhere, f"{path}{name}")
    return found


def _check_one(
    found: Checked, name: str, value: Any, table: Mapping[str, Key], elsewhere: Sequence[str], place: str
) -> None:
    key = table.get(place)
    if key is None or "." in name:
        # to find what is alike takes time, and nobody reads more than the first few
        known = (*table, *elsewhere) if len(found.problems) < MOST_SHOWN else ()
        idle = {} if not known else {path: why for path, why in useless(table).items() if RECOMPUTES not in path}
        found.problems.append(unknown(place, value, known, idle))
        return
    whole = value
    if isinstance(value, dict) and any(known.startswith(f"{place}.") for known in table):
        below = check(value, table, elsewhere, f"{place}.")
        found.problems += below.problems
        found.idle |= {} if key.idle else below.idle
        if value and not (below.values or key.idle or key.refused):
            return  # each of its keys has a note, or asks for nothing
        value = {**below.idle, **below.values} if key.idle else below.values
    elif not (key.refused or (isinstance(value, bool) and place == "zero_optimization")):
        try:
            value = coerce(value, key)
        except ValueError:
            found.problems.append(misfit(place, value, key))
            return
    if key.refused:
        with suppress(ValueError):
            whole = coerce(whole, key)
        if whole not in key.otherwise if key.otherwise else not _is_off(whole, place, table):
            why, _, mend = key.refused.partition(". ")
            found.problems.append(Problem(place, f"saw {show(whole)}", f"no such key: {why}", f"{mend}."))
        elif isinstance(value, dict) and value and "enabled" not in value:
            found.idle[place] = UNSAID.format("enabled")
    elif not key.idle:
        found.values[name] = value
    elif key.asks(value):
        found.idle[place] = key.idle


def _is_off(value: Any, place: str, table: Mapping[str, Key]) -> bool:
    """Whether a refused key asks for nothing; to DeepSpeed a section that does not say "enabled" is off."""
    named = isinstance(value, dict) and f"{place}.enabled" in table
    return is_off({"enabled": False, **value} if named else value)
