"""The one translator of foreign keys: it reads the tables in the YAML files beside it.

`arguments.yml` explains their sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainer.config.keys.key import AUTO
from trainer.errors import ConfigError, Problem, listed, show, suggestion
from trainer.storage import Json
from trainer.tools.importers.draft import OTHERWISE, Draft, Entry, Roles, is_set, number


class KeyRule(NamedTuple):
    """How a key is converted: the section of the table that lists it, and its value there."""

    section: str
    says: Any = None


PREFERENCES = "Say which of TRL's trainers it is: --from trl-dpo, trl-cpo, trl-orpo or trl-reward."
Table = Mapping[str, KeyRule]
Group = Callable[[Draft, Roles], None]
"""Converts keys that belong together."""


class OtherTrainer(NamedTuple):
    """Another trainer: its keys, its defaults, and functions for keys that belong together."""

    table: Table
    defaults: Callable[[Json], Json]
    groups: Sequence[Group]


@cache
def read_table(system: str) -> Json:
    path = Path(__file__).parent / f"{system}.yml"
    content: Json = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def table(system: str) -> dict[str, KeyRule]:
    """Return the rule of each key of a system's config."""
    content = read_table(system)
    return {**shared_rows(content), **dict(rows_of(content))}


def extended(base: Table, content: Json) -> dict[str, KeyRule]:
    """Return the table `base`, with the rows in `content` added or in place of its own."""
    return {**base, **dict(rows_of(content))}


def kind_of_training(
    content: Json, base: Table, defaults: Callable[[Json], Json], groups: Sequence[Group]
) -> OtherTrainer:
    """Return a trainer with this table and these defaults, some of them replaced by `content`."""

    def own(given: Json) -> Json:
        return {**defaults(given), **content["defaults"]}

    return OtherTrainer(extended(base, content), own, groups)


def inner_table(system: str) -> dict[str, KeyRule]:
    """Return the rule of each key inside the system's nested section, such as a data set."""
    return dict(rows_of(read_table(system)["inner"]))


def shared_rows(content: Json) -> dict[str, KeyRule]:
    """Return the rows of the Trainer's table that a system shares.

    They are all but the carried ones that are neither common nor in `shared`.
    """
    if "shared" not in content:
        return {}
    taken = [*read_table("arguments")["common"].split(), *content["shared"].split()]
    rows = table("arguments").items()
    return {key: row for key, row in rows if row.section != "carried" or key in taken}


def rows_of(content: Json) -> Iterator[tuple[str, KeyRule]]:
    yield from ((key, KeyRule("carried", "@")) for key in content.get("joint", "").split())
    for section in ("listed", "unlike"):
        yield from ((key, KeyRule(section)) for key in content.get(section, "").split())
    for section in ("alike", "carried"):
        yield from ((key, KeyRule(section, says)) for key, says in content.get(section, {}).items())
    for section in ("another", "noted"):
        for says, keys in content.get(section, {}).items():
            yield from ((key, KeyRule(section, says)) for key in keys.split())


def fill(draft: Draft, rules: Table, defaults: Json, groups: Sequence[Group] = ()) -> None:
    """Convert each foreign key by its rule; a key without one is lost.

    Raises ConfigError for keys of another kind of training, and for values of a wrong type.
    """
    given = {key: value for key, value in draft.given.items() if value is not None}
    draft.listed.extend(draft.prefix + key for key in draft.given.keys() - given.keys())
    candidates: dict[str, list[tuple[Entry, object]]] = {}
    others: dict[str, list[Entry]] = {}
    for key, value in _apart({**defaults, **given}, rules):
        entry = Entry(draft.prefix + key, number(value))
        rule = rules.get(key)
        if rule is None:
            near = suggestion(key, list(rules), cutoff=0.8)
            draft.lose(entry, f"not known. {near}" if near else "not known")
        elif rule.section == "another" and is_set(value):
            others.setdefault(rule.says, []).append(entry)
        elif rule.section == "carried":
            place, ours = _translated(draft, key, entry, rule.says)
            candidates.setdefault(place, []).append((entry, ours))
        elif rule.section == "noted" and is_set(value):
            draft.note(entry, rule.says)
        elif rule.section == "unlike" and is_set(value):
            draft.lose(entry)
        elif rule.section == "alike" and not _alike(value, rule.says):
            draft.lose(entry, OTHERWISE)
        else:
            draft.skip(entry)
    if others:
        raise ConfigError(*(_other(kind, entries) for kind, entries in others.items()))
    _put(draft, candidates, groups)


def _translated(draft: Draft, key: str, entry: Entry, says: Any) -> tuple[str, object]:
    """Return the place of a carried key, a path of ours or @ROLE, and its value there.

    The value is None if there is nothing to set. Raises ConfigError for a value of a wrong type.
    """
    if isinstance(says, dict):
        known = isinstance(entry.value, str | int | float) and entry.value in says["values"]
        if entry.is_set and not known:
            draft.lose(entry)
        return says["to"], says["values"][entry.value] if known else None
    if says.startswith("@"):
        role = says[1:] or key
        _check_type(entry, role)
        return f"@{role}", entry.value
    return says, entry.value


def _put(
    draft: Draft, candidates: Mapping[str, list[tuple[Entry, object]]], groups: Sequence[Group]
) -> None:
    """Set our keys that one foreign key decides, and then those that several decide."""
    roles = Roles(Entry)
    for place, named in candidates.items():
        entry, ours = _chosen(draft, named)
        if place.startswith("@"):
            roles[place[1:]] = entry
        elif ours is not None:
            for path in place.split():
                draft.put(entry, path, ours)
        elif not draft.reported(entry):
            draft.skip(entry)
    for group in groups:
        group(draft, roles)
    for entry in roles.values():
        if draft.explicit(entry) and not draft.reported(entry):
            (draft.lose if entry.is_set else draft.skip)(entry)


def _chosen(draft: Draft, candidates: Sequence[tuple[Entry, object]]) -> tuple[Entry, object]:
    """Return the key that decides: the user's before a default, then one that is set before empty.

    The user's other keys are lost if they are set to something else.
    """
    chosen = max(candidates, key=lambda one: (draft.explicit(one[0]), one[0].is_set))
    for entry, ours in candidates:
        if entry is chosen[0]:
            continue
        if draft.explicit(entry) and entry.is_set and ours != chosen[1]:
            draft.lose(entry, f"{chosen[0].key} says {show(chosen[0].value)}")
        elif not draft.reported(entry):
            draft.skip(entry)
    return chosen


_WORDS = ("full", "unsloth", "offload", "offload_disk", "legacy")
"""Values of Axolotl's that mean true."""
_TYPES: dict[str, Callable[[object], bool]] = {
    "a number": lambda value: type(value) in (int, float),
    "true or false": lambda value: isinstance(value, bool) or value in (0, 1, AUTO, *_WORDS),
}


def _check_type(entry: Entry, role: str) -> None:
    """Raise ConfigError for a value of a type with which a `Group` could not compute."""
    for kind, fits in _TYPES.items():
        if role in read_table("arguments")["types"][kind].split() and not fits(entry.value):
            raise entry.refused(kind)


def _apart(given: Json, rules: Table) -> Iterator[tuple[str, object]]:
    """Yield keys with values; a section whose keys have rules of their own yields each of them."""
    for key, value in given.items():
        if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in rules):
            yield from ((f"{key}.{inner}", below) for inner, below in value.items())
        else:
            yield key, value


def _other(kind: str, entries: Sequence[Entry]) -> Problem:
    keys = listed([f"{entry.key} {show(entry.value)}" for entry in entries])
    expected = "a kind of training that is imported"
    hint = PREFERENCES if kind.startswith("preferences") else ""
    return Problem(entries[0].key, f"saw {keys}: {kind}", expected, hint)


def _alike(value: object, values: Iterable[object]) -> bool:
    """Return True if a value, or each value in a section or list, is one of `values`."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return all(_alike(one, values) for one in inner)
    converted = number(value)
    same = (converted == known and type(converted) is type(known) for known in values)
    return value is None or any(same)
