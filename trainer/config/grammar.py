"""The grammar of a key table: what one JSON key may hold, and how a value is checked against it.

A table is text, one row per key or per group of keys that take the same values:

    [section]                                         starts a section; `[]` is the top level
    name name ... : type range auto null ; why        `; why`: accepted, without effect here
    name : type ! why                                 `! why`: an error unless it is switched off

with the types bool, int, float, str, list, any and section, and ranges as `>=1`, `>0`, `0..3` or `a|b|c`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from trainer.errors import Problem

AUTO = "auto"


@dataclass(frozen=True)
class Key:
    """What one key may hold."""

    kind: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    """`low` itself is not allowed."""
    choices: tuple[str, ...] = ()
    auto: bool = False
    null: bool = False
    idle: str = ""
    """Why the key has no effect here; such a key is not handed on to DeepSpeed."""
    refused: str = ""
    """Why the key is an error unless it is switched off."""

    @property
    def expected(self) -> str:
        """What a person has to write, e.g. `a whole number of at least 1 or "auto"`."""
        text = " or ".join(f'"{choice}"' for choice in self.choices) or _NOUNS[self.kind]
        if self.high is not None:
            text += f" from {self.low:g} to {self.high:g}"
        elif self.low is not None:
            text += f" above {self.low:g}" if self.above else f" of at least {self.low:g}"
        return text + ' or "auto"' * self.auto + " or null" * self.null


def parse(table: str) -> dict[str, Key]:
    """The keys of a table by their dotted path."""
    keys: dict[str, Key] = {}
    section = ""
    for line in filter(None, map(str.strip, table.splitlines())):
        if line.startswith("["):
            section, _, spec = line[1:].partition("]")
            if section:
                keys[section] = _key("section " + spec)
                section += "."
        else:
            names, _, spec = line.partition(" : ")
            keys.update({section + name: _key(spec) for name in names.split()})
    return keys


def _key(spec: str) -> Key:
    spec, _, refused = spec.partition(" ! ")
    spec, _, idle = spec.partition(" ; ")
    kind, *words = spec.split()
    fields: dict[str, Any] = {"idle": idle, "refused": refused}
    for word in words:
        if word in ("auto", "null"):
            fields[word] = True
        elif match := re.fullmatch(r"(>=?)(.+)", word):
            fields.update(low=float(match[2]), above=match[1] == ">")
        elif match := re.fullmatch(r"(.+)\.\.(.+)", word):
            fields.update(low=float(match[1]), high=float(match[2]))
        else:
            fields["choices"] = tuple(word.split("|"))
    return Key(kind, **fields)


def coerce(value: Any, key: Key) -> Any:
    """`value` as the key's own type, taking what DeepSpeed's pydantic models take (5e8 for an int, "1e-5" for a float).

    Raises ValueError where the value does not fit.
    """
    if (value == AUTO and key.auto) or (value is None and key.null):
        return value
    value = _CASTS[key.kind](value)
    if key.choices:
        value = {choice.lower(): choice for choice in key.choices}.get(value.lower(), "")
        if not value:
            raise ValueError
    if key.low is not None and (value < key.low or (key.above and value == key.low)):
        raise ValueError
    if key.high is not None and value > key.high:
        raise ValueError
    return value


def is_off(value: Any) -> bool:
    """Whether a section or a flag asks for nothing: false, null, empty, or not enabled."""
    return not value or (isinstance(value, dict) and value.get("enabled", True) in (False, AUTO))


def show(value: Any) -> str:
    """A value as a person wrote it in JSON, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def unknown(path: str, value: Any, known: list[str]) -> Problem:
    """The problem of a key that is not in the table, with the nearest of the `known` paths."""
    section, _, name = path.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    homes = [other for other in known if other.rpartition(".")[2] == name]
    near = get_close_matches(name, siblings, n=2, cutoff=0.5)
    if near and (not homes or get_close_matches(name, near, cutoff=0.8)):
        likeness = [SequenceMatcher(None, name, other).ratio() for other in near]
        best = [f'"{other}"' for other, ratio in zip(near, likeness, strict=True) if ratio == max(likeness)]
        mend = f"Did you mean {' or '.join(best)}?"
    else:
        mend = f"Did you mean {' or '.join(homes)}?" if 1 <= len(homes) <= 3 else "Remove it."
    where = f'the section "{section}"' if section else "the top level"
    return Problem(path, f"saw {show(value)}", f"a known key of {where}", mend)


def misfit(path: str, value: Any, key: Key) -> Problem:
    """The problem of a value that its key does not take."""
    return Problem(path, f"saw {show(value)}", key.expected)


_NOUNS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "any": "anything",
    "section": "a section {...}",
}
_FLAGS = {word: truth for truth, words in ((True, "1 true t yes y on"), (False, "0 false f no n off"))
          for word in words.split()}  # fmt: skip


def _bool(value: Any) -> bool:
    if isinstance(value, list | dict) or str(value).lower() not in _FLAGS:
        raise ValueError
    return _FLAGS[str(value).lower()]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(number):
        raise ValueError
    return number


def _int(value: Any) -> int:
    number = _number(value)
    if not number.is_integer():
        raise ValueError
    return value if isinstance(value, int) else int(number)


def _instance(kind: type) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return cast


_CASTS: dict[str, Callable[[Any], Any]] = {
    "bool": _bool,
    "int": _int,
    "float": _number,
    "str": _instance(str),
    "list": _instance(list),
    "section": _instance(dict),
    "any": lambda value: value,
}
