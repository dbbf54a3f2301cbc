"""A config in the making: each key of theirs goes by a table, and what became of it is said.

A table is text, one row per key or per group of keys:

    name name ... : path               carried over to the key at `path`, as it is
    name : path ~ why                  carried over, but with another meaning
    name : @group role                 several keys make some of ours together: see the function of the group
    name : - =value,value why          left out, and why; `=`: the values that ask for nothing, beside false and null

Names may stand on several lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainer.config.grammar import AUTO, show
from trainer.config.read import Json, leaves
from trainer.errors import ConfigError, Problem


class Row(NamedTuple):
    """What becomes of a key."""

    path: str = ""
    why: str = ""
    group: str = ""
    role: str = ""
    nothing: tuple[Any, ...] = ()
    """The values that ask for nothing."""


class Asked(NamedTuple):
    """A key of theirs, and its value."""

    key: str
    value: Any


Roles = Mapping[str, Asked]
"""Of a group's keys: those that were given, or have a default of theirs, by their role."""


def parse(table: str) -> dict[str, Row]:
    """The rows of a table by key."""
    rows: dict[str, Row] = {}
    waiting = ""
    for line in filter(None, map(str.strip, table.splitlines())):
        names, colon, spec = f"{waiting} {line}".partition(" : ")
        waiting = "" if colon else names
        if not colon:
            continue
        spec, _, why = spec.partition(" ~ ")
        if spec.startswith("@"):
            group, role = spec[1:].split()
            row = Row(group=group, role=role)
        elif spec.startswith("- "):
            start, _, rest = spec[2:].partition(" ")
            nothing = start.startswith("=")
            values = tuple(map(yaml.safe_load, start[1:].split(","))) if nothing else ()
            row = Row(why=rest if nothing else spec[2:], nothing=values)
        else:
            row = Row(spec, why)
        rows |= dict.fromkeys(names.split(), row)
    return rows


@dataclass
class Draft:
    """Ours as far as it is made, and what is to be said of theirs."""

    given: Json
    folder: Path
    """Where their file is."""
    place: str = ""
    """Before our keys when they are shown, for a part of a config."""
    prefix: str = ""
    """Before their keys."""
    made: Json = field(default_factory=dict)
    base: Json = field(default_factory=dict)
    """The DeepSpeed file: what it says stays, but for "auto"."""
    carried: dict[str, list[str]] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    """Keys that ask for nothing."""

    def put(self, asked: Asked, path: str, value: Any, why: str = "") -> None:
        """Set `path` for what was asked, unless the DeepSpeed file says otherwise; `why`: how its meaning changes."""
        section, held = path.partition(".")[0], dict(leaves(self.base)).get(path)
        own = section in ("optimizer", "scheduler") and section in self.base and held is None
        if own or held not in (None, AUTO):
            said = f"has an {section} of its own" if own else f"says {path} {show(held)}"
            if self.explicit(asked) and (own or held != value):
                self.leave(asked, f"the DeepSpeed file {said}")
            elif self.explicit(asked):
                self._say(self.carried, asked, f"{path} {show(held)}")
            return
        *sections, name = path.split(".")
        inner = self.made
        for part in sections:
            inner = inner.setdefault(part, {})
        inner[name] = value
        shown = f"{self.place}{path} {show(value)}"
        self._say(self.changed if why else self.carried, asked, f"{shown}: {why}" if why else shown)

    def change(self, asked: Asked, why: str) -> None:
        """Say that what was asked has another meaning here."""
        self._say(self.changed, asked, why)

    def keep(self, asked: Asked, why: str) -> None:
        """Say that what was asked is done here anyway."""
        if self.explicit(asked):
            self._say(self.carried, asked, why)

    def leave(self, asked: Asked, why: str) -> None:
        """Say that what was asked is not carried over."""
        self._say(self.left, asked, why)

    def has(self, path: str) -> bool:
        """Whether ours, or the DeepSpeed file, has the key."""
        return path in dict(leaves(self.made)) or path in dict(leaves(self.base))

    def take(self, other: Draft) -> Json:
        """What a part of the config became, its lines with those of the whole."""
        for mine, theirs in ((self.carried, other.carried), (self.changed, other.changed), (self.left, other.left)):
            for key, lines in theirs.items():
                mine.setdefault(key, []).extend(lines)
        self.idle += other.idle
        return other.made

    def explicit(self, asked: Asked) -> bool:
        """Whether they wrote it; else it is a default of theirs."""
        return asked.key.removeprefix(self.prefix) in self.given

    def _say(self, lines: dict[str, list[str]], asked: Asked, text: str) -> None:
        key = f"{asked.key} {show(asked.value)}"
        lines.setdefault(key if self.explicit(asked) else f"{key} (their default)", []).append(text)


Group = Callable[[Draft, Roles], None]


def fill(draft: Draft, table: Mapping[str, Row], defaults: Json, groups: Mapping[str, Group]) -> None:
    """Carry each key of theirs over by the table; a key that the table lacks is named, and so is one that is left."""
    together: dict[str, dict[str, Asked]] = {group: {} for group in groups}
    given = {key: value for key, value in draft.given.items() if value is not None}
    draft.idle += [draft.prefix + key for key in draft.given.keys() - given.keys()]
    for key, value in (defaults | given).items():
        asked, row = Asked(draft.prefix + key, number(value)), table.get(key)
        if row is None:
            draft.leave(asked, f"not known{_near(key, table)}")
        elif row.group:
            _join(draft, together[row.group], row.role, asked)
        elif row.path:
            draft.put(asked, row.path, asked.value, row.why)
        elif asks(value, row.nothing):
            draft.leave(asked, row.why)
        else:
            draft.idle.append(asked.key)
    for name, group in groups.items():
        group(draft, together[name])
    _say_rest(draft, [asked for roles in together.values() for asked in roles.values()], given)


_NUMBERS = "steps epochs share per_epoch limit held beta1 beta2 least rank patience window longest"
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_NUMBERS.split(), ((int, float), "a number")),
    **dict.fromkeys(("names_of", "tags", "columns"), (dict, "a section of keys and values")),
}
"""What the values of some roles have to be, as functions of groups count with them."""


def _join(draft: Draft, roles: dict[str, Asked], role: str, asked: Asked) -> None:
    """Of several keys for one role the first that asks for something has it, and what they wrote before a default.

    Raises ConfigError for a value that is not even of the role's kind.
    """
    kind, noun = _KINDS.get(role, (object, ""))
    if not isinstance(asked.value, kind) or (noun == "a number" and asked.value is True):
        raise ConfigError(Problem(asked.key, f"saw {show(asked.value)}", noun))
    other = roles.get(role)
    if other is None or not draft.explicit(other) or not asks(other.value):
        roles[role] = asked
        if other is not None and draft.explicit(other):
            draft.idle.append(other.key)
    elif asks(asked.value):
        draft.leave(asked, f"{other.key} says it")
    else:
        draft.idle.append(asked.key)


def _say_rest(draft: Draft, grouped: Iterable[Asked], given: Json) -> None:
    """Name the keys of groups that nothing was said of."""
    said = {line.partition(" ")[0] for lines in (draft.carried, draft.changed, draft.left) for line in lines}
    for asked in grouped:
        if asked.key in said or asked.key.removeprefix(draft.prefix) not in given:
            continue
        if asks(asked.value):
            draft.leave(asked, "it changes nothing beside the other keys")
        else:
            draft.idle.append(asked.key)


def asks(value: Any, nothing: Iterable[Any] = ()) -> bool:
    """Whether a value asks for something; of a section, any of its values."""
    if isinstance(value, dict):
        return any(asks(inner, nothing) for inner in value.values())
    return not (value is None or value is False or value in ("", "none", "None", []) or value in tuple(nothing))


def number(value: Any) -> Any:
    """A number where it was written as text: YAML reads 2e-5 so."""
    if not isinstance(value, str) or value[:1] not in "-+.0123456789":
        return value
    try:
        found = float(value)
    except ValueError:
        return value
    return int(found) if value.lstrip("-").isdigit() else found


def names(value: Any) -> list[str]:
    """The names in a list, or in a text with commas or spaces between them."""
    listed = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(name) for name in listed]


def _near(key: str, table: Iterable[str]) -> str:
    near = get_close_matches(key[:100], list(table), n=1, cutoff=0.8)
    return f': did you mean "{near[0]}"?' if near else ""
