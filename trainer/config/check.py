"""Walks a config along a key table: unknown keys, wrong values, removed keys, keys without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.grammar import Key, coerce, is_off, misfit, show, unknown
from trainer.config.read import Json
from trainer.errors import Problem


@dataclass
class Checked:
    """The outcome of a walk: the values that go on, coerced to their types; the problems; the notes."""

    values: Json = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    if key is None:
        found.problems.append(unknown(place, value, [*table, *elsewhere]))
        return
    if key.refused:
        if not is_off(value):
            why, _, mend = key.refused.partition(". ")
            found.problems.append(Problem(place, f"saw {show(value)}", f"no such key: {why}", f"{mend}."))
        return
    if isinstance(value, dict) and any(known.startswith(f"{place}.") for known in table):
        below = check(value, table, elsewhere, f"{place}.")
        found.problems += below.problems
        found.notes += [] if key.idle else below.notes
        if value and not below.values:
            return  # nothing of it has an effect
        value = below.values
    elif not (isinstance(value, bool) and place == "zero_optimization"):
        try:
            value = coerce(value, key)
        except ValueError:
            found.problems.append(misfit(place, value, key))
            return
    if not key.idle:
        found.values[name] = value
    elif not is_off(value):
        found.notes.append(f"{place} has no effect here: {key.idle}")
