"""A config in the making: each foreign key is handled by a table, and the result is recorded.

The tables are data, one YAML file per system; `arguments.yml` explains their sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainer.config.grammar import AUTO, show
from trainer.config.read import Json, leaves
from trainer.errors import ConfigError, Problem, listed


class KeyRule(NamedTuple):
    """The handling of a key: a section of the table, and what stands there."""

    section: str
    says: Any = None


class Entry(NamedTuple):
    """A key of the foreign config, and its value."""

    key: str
    value: Any


Table = Mapping[str, KeyRule]
Roles = Mapping[str, Entry]
"""The keys of a group that were given, or have a default, by their role."""


def tables(name: str) -> tuple[dict[str, KeyRule], dict[str, KeyRule]]:
    """Read the rows of `name`.yml by key: of a config, and of a section in it."""
    found = data(name)
    return dict(_rows(found)), dict(_rows(found["inner"]))


@cache
def data(name: str) -> Json:
    found: Json = yaml.safe_load(
        Path(__file__).with_name(f"{name}.yml").read_text(encoding="utf-8")
    )
    return found


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, KeyRule]]:
    ways = found.get("ways", {})
    for section in ("listed", "unlike"):
        yield from ((key, KeyRule(section, ways.get(key, ""))) for key in found[section].split())
    for section in ("alike", "carried"):
        yield from ((key, KeyRule(section, says)) for key, says in found.get(section, {}).items())
    for kind, keys in found.get("another", {}).items():
        yield from ((key, KeyRule("another", kind)) for key in keys.split())


@dataclass
class Draft:
    """The converted config so far, and the report on foreign keys."""

    given: Json
    folder: Path
    """The folder of the foreign file."""
    place: str = ""
    """The prefix of our keys in the report, for a part of a config."""
    prefix: str = ""
    """The prefix of foreign keys."""
    made: Json = field(default_factory=dict)
    base: Json = field(default_factory=dict)
    """The content of the DeepSpeed file, which stays, except for "auto"."""
    carried: dict[str, list[str]] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    """Foreign keys that change the training and are not carried over."""
    listed: list[str] = field(default_factory=list)
    """Keys that ask for nothing, or change nothing of what is trained beside the others."""

    def put(self, entry: Entry, path: str, value: Any, why: str = "") -> None:
        """Set `path` for a foreign key, unless the DeepSpeed file has another value, and report
        it.
        """
        section, held = path.partition(".")[0], dict(leaves(self.base)).get(path)
        own = section in ("optimizer", "scheduler") and section in self.base and held is None
        if own or held not in (None, AUTO):
            if self.explicit(entry) and not own and held != value:
                self.lose(entry, f"the DeepSpeed file says {path} {show(held)}")
            elif self.explicit(entry):
                self._say(
                    self.carried, entry, f"the DeepSpeed file says {section if own else path}"
                )
            return
        *sections, name = path.split(".")
        inner = self.made
        for part in sections:
            inner = inner.setdefault(part, {})
        inner[name] = value
        self._say(self.carried, entry, f"{self.place}{path} {show(value)}{why and f' ({why})'}")

    def keep(self, entry: Entry, why: str) -> None:
        """Report where a foreign key is in ours."""
        self._say(self.carried, entry, why)

    def lose(self, entry: Entry, why: str = "it does nothing beside the other keys") -> None:
        """Report that a foreign key changes what is trained, and is not carried over."""
        self._say(self.lost, entry, why)

    def skip(self, *given: Entry | None) -> None:
        """Report keys that change nothing of what is trained, or nothing beside the others."""
        found = (entry.key for entry in given if entry and self.explicit(entry))
        self.listed += [key for key in found if key not in self.listed]

    def has(self, path: str) -> bool:
        """Return True if the converted config, or the DeepSpeed file, has the key."""
        return path in dict(leaves(self.made)) or path in dict(leaves(self.base))

    def take(self, other: Draft) -> Json:
        """Return the part of the config that `other` converted, and add its report to this one."""
        for mine, theirs in ((self.carried, other.carried), (self.lost, other.lost)):
            for key, lines in theirs.items():
                mine.setdefault(key, []).extend(lines)
        self.listed += other.listed
        return other.made

    def explicit(self, entry: Entry) -> bool:
        """Return True if the user wrote the key; else it is a default of the foreign trainer."""
        key = entry.key.removeprefix(self.prefix)
        return key in self.given or key.partition(".")[0] in self.given

    def _say(self, lines: dict[str, list[str]], entry: Entry, text: str) -> None:
        key = f"{entry.key} {show(entry.value)}"
        lines.setdefault(key if self.explicit(entry) else f"{key} (their default)", []).append(text)


Group = Callable[[Draft, Roles], None]


def fill(draft: Draft, table: Table, defaults: Json, groups: Mapping[str, Group]) -> None:
    """Convert each foreign key by the table; a key that the table lacks is lost.

    Raises ConfigError for keys of another kind of training.
    """
    together: dict[str, dict[str, Entry]] = {group: {} for group in groups}
    given = {key: value for key, value in draft.given.items() if value is not None}
    draft.listed.extend(draft.prefix + key for key in draft.given.keys() - given.keys())
    others: dict[str, list[Entry]] = {}
    for key, value in _apart(defaults | given, table):
        entry, row = Entry(draft.prefix + key, number(value)), table.get(key)
        if row is None:
            draft.lose(entry, f"not known{_near(key, table)}")
        elif row.section == "another" and asks(value):
            others.setdefault(row.says, []).append(entry)
        elif row.section == "carried" and row.says.startswith("@"):
            group, role = row.says[1:].split()
            _join(draft, together[group], role, entry)
        elif row.section == "carried":
            draft.put(entry, row.says, entry.value)
        elif row.section == "unlike" and asks(value):
            draft.lose(entry, row.says)
        elif row.section == "alike" and not _alike(value, row.says):
            draft.lose(entry, f"alike is only {' or '.join(map(show, row.says)) or 'null'}")
        else:
            draft.skip(entry)
    if others:
        raise ConfigError(*(_other(kind, found) for kind, found in others.items()))
    for name, group in groups.items():
        group(draft, together[name])
    _lose_rest(draft, [entry for roles in together.values() for entry in roles.values()])


def _apart(given: Json, table: Table) -> Iterator[tuple[str, Any]]:
    """Yield keys with their values; a section with keys of its own in the table yields each of
    those.
    """
    for key, value in given.items():
        if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in table):
            yield from ((f"{key}.{inner}", below) for inner, below in value.items())
        else:
            yield key, value


def _other(kind: str, found: list[Entry]) -> Problem:
    keys = listed([f"{entry.key} {show(entry.value)}" for entry in found])
    return Problem(
        found[0].key,
        f"saw {keys}: {kind}",
        "training on the next token of text: no other is imported",
    )


_NUMBERS = (
    "steps epochs share per_epoch limit held beta1 beta2 least r patience window longest "
    "micro whole most"
)
_FLAGS = "bf16 fp16 trains predicts best pure packing neat last all answers on off"
_WORDS = ("full", "unsloth", "offload", "offload_disk", "legacy")
"""Values of Axolotl's that mean true."""
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (*_NUMBERS.split(), "accumulation"), (lambda v: type(v) in (int, float), "a number")
    ),
    **dict.fromkeys(
        _FLAGS.split(),
        (lambda v: isinstance(v, bool) or v in (0, 1, AUTO, *_WORDS), "true or false"),
    ),
}
"""The kind of value that a role requires, because functions of groups compute with it."""


def _join(draft: Draft, roles: dict[str, Entry], role: str, entry: Entry) -> None:
    """Assign a key to a role: the first of several that asks for something, a written one before a
    default.

    Raises ConfigError for a value that is not of the role's kind.
    """
    fits, noun = _KINDS.get(role, (lambda value: True, ""))
    if not fits(entry.value):
        raise ConfigError(Problem(entry.key, f"saw {show(entry.value)}", noun))
    other = roles.get(role)
    if other is None or not draft.explicit(other) or not asks(other.value):
        roles[role] = entry
        if other is not None:
            draft.skip(other)
    elif asks(entry.value) and entry.value != other.value and role not in _ALSO:
        draft.lose(entry, f"{other.key} says {show(other.value)}")
    else:
        draft.skip(entry)


_ALSO = ("wandb", "mlflow")
"""Roles of which several keys form one meaning."""


def _lose_rest(draft: Draft, grouped: Iterable[Entry]) -> None:
    """Report keys of groups as lost if nothing was reported of them, unless they ask for
    nothing.
    """
    reported = {
        line.partition(" ")[0] for lines in (draft.carried, draft.lost) for line in lines
    } | {*draft.listed}
    for entry in grouped:
        if entry.key not in reported and draft.explicit(entry):
            (draft.lose if asks(entry.value) else draft.skip)(entry)


def asks(value: Any) -> bool:
    """Return True if a value asks for something; for a section, if any of its values does."""
    if isinstance(value, dict):
        return any(map(asks, value.values()))
    return not (value is None or value is False or value in ("", "none", "None", []))


def _alike(value: Any, values: Iterable[Any]) -> bool:
    if isinstance(value, dict | list):
        return all(
            _alike(inner, values)
            for inner in (value.values() if isinstance(value, dict) else value)
        )
    return value is None or any(
        number(value) == known and type(number(value)) is type(known) for known in values
    )


def number(value: Any) -> Any:
    """Convert a number written as text: YAML reads 2e-5 as text."""
    if not isinstance(value, str) or value[:1] not in "-+.0123456789" or len(value) > 40:
        return value
    try:
        found = float(value)
    except ValueError:
        return value
    if not math.isfinite(found):
        return value
    return int(found) if value.lstrip("-").isdigit() else found


def names(value: Any) -> list[str]:
    """Return the names in a list, or in a text separated by commas or spaces."""
    given = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(name) for name in given]


def _near(key: str, table: Iterable[str]) -> str:
    near = get_close_matches(key[:100], list(table), n=1, cutoff=0.8)
    return f': did you mean "{near[0]}"?' if near else ""
