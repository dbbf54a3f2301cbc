"""The grammar of a key table: the values that a JSON key may hold, and the checks of a value
against it.

A table is text, one row per key or per group of keys that take the same values:

    [section]                                         starts a section; `[]` is the top level
    name name ... : type range auto null = default    a JSON default; without, the key is left out
    name : type ; why                                 `; why`: accepted, without effect here
    name : type ! why                                 `! why`: an error unless it is switched off
    name : type =value @ why                          `@ why`: DeepSpeed alone honours it
    name : type =value @! why                         `@! why`: as `@`, and the others refuse it

with the types bool, int, float, str, dtype, list, any and section, and ranges as `>=1`, `>0`,
`0..3` or `a|b|c`. The engines that do not honour a key do as if it were `=value` (several by
commas), or switched off; 0 is a value. A section's `@` goes for its keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType
from typing import Any

from trainer.errors import Problem

AUTO = "auto"


@dataclass(frozen=True)
class Key:
    """The values that one key may hold."""

    kind: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    """True if `low` itself is not allowed."""
    choices: tuple[str, ...] = ()
    auto: bool = False
    null: bool = False
    default: Any = None
    """DeepSpeed's own default; None if the key may stay missing."""
    idle: str = ""
    """The reason why the key has no effect here; it is then not passed to DeepSpeed."""
    refused: str = ""
    """The reason why the key is an error unless it is switched off."""
    own: str = ""
    """The behaviour of engines other than DeepSpeed instead; empty if they honour it."""
    numbers: bool = False
    """True if training without it computes other numbers."""
    otherwise: tuple[Any, ...] = ()
    """The values with which it asks for just what the other engines do."""

    @property
    def expected(self) -> str:
        """The accepted values in words, e.g. `a whole number of at least 1 or "auto"`."""
        text = " or ".join(f'"{choice}"' for choice in self.choices) or _NOUNS[self.kind]
        if self.high is not None:
            text += f" from {self.low:,.15g} to {self.high:,.15g}"
        elif self.low is not None:
            text += f" above {self.low:g}" if self.above else f" of at least {self.low:g}"
        return text + ' or "auto"' * self.auto + " or null" * self.null

    def asks(self, value: Any) -> bool:
        """Return True if `value` asks for something that is not done anyway."""
        if value is None or value == AUTO:
            return False
        number = self.kind in ("int", "float", "any") and not isinstance(value, bool | list | dict)
        return value not in self.otherwise if self.otherwise or number else not is_off(value)


def parse(table: str) -> dict[str, Key]:
    """Parse a table; return its keys by their dotted path."""
    keys: dict[str, Key] = {}
    section, whole = "", Key("section")
    for line in filter(None, map(str.strip, table.splitlines())):
        if line.startswith("["):
            section, _, spec = line[1:].partition("]")
            if section:
                keys[section] = whole = _key("section " + spec)
                section += "."
        else:
            names, _, spec = line.partition(" : ")
            key = _key(spec)
            if whole.own and not key.own:
                key = replace(key, own=whole.own, numbers=whole.numbers)
            keys.update({section + name: key for name in names.split()})
    return keys


def _key(spec: str) -> Key:
    spec, _, refused = spec.partition(" ! ")
    spec, _, idle = spec.partition(" ; ")
    spec, mark, own = re.fullmatch(r"(.*?)(?: @(!?) (.*))?", spec).groups(default="")  # type: ignore[union-attr]
    spec, _, default = spec.partition(" = ")
    kind, *words = spec.split()
    fields: dict[str, Any] = {
        "idle": idle,
        "refused": refused,
        "default": json.loads(default or "null"),
    }
    fields |= {"own": own, "numbers": mark == "!"}
    for word in words:
        if word in ("auto", "null"):
            fields[word] = True
        elif word.startswith("="):
            fields["otherwise"] = tuple(_CASTS[kind](value) for value in word[1:].split(","))
        elif match := re.fullmatch(r"(>=?)(.+)", word):
            fields.update(low=float(match[2]), above=match[1] == ">")
        elif match := re.fullmatch(r"(.+)\.\.(.+)", word):
            fields.update(low=float(match[1]), high=float(match[2]))
        else:
            fields["choices"] = tuple(word.split("|"))
    return Key(kind, **fields)


def coerce(value: Any, key: Key) -> Any:
    """Convert `value` to the key's type, as DeepSpeed's pydantic models do (5e8 for an int, "1e-5"
    for a float).

    Raises ValueError if the value does not fit.
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
    """Return True if a section or a flag asks for nothing: false, null, empty, or not enabled."""
    return not value or (isinstance(value, dict) and value.get("enabled", True) in (False, AUTO))


def show(value: Any, most: int = 60) -> str:
    """Show a value as JSON, cut to `most` characters; as cheap for one of 100 MB."""
    if isinstance(value, str):
        value = value[: most + 1]
    text = ""
    for part in json.JSONEncoder(default=str).iterencode(value):
        text += part[: most + 1]
        if len(text) > most:
            return text[: most - 3] + "..."
    return text


def unknown(
    path: str, value: Any, known: Sequence[str], useless: Mapping[str, str] = MappingProxyType({})
) -> Problem:
    """Build the problem of a key that is not in the table, with the nearest of the `known` paths.

    `useless` holds known paths that must not be suggested, each with the reason.
    """
    section = path.rpartition(".")[0]
    where = f'the section "{section}"' if section else "the top level"
    return Problem(
        path, f"saw {show(value)}", f"a known key of {where}", _mend(path, known, useless)
    )


def useless(table: Mapping[str, Key]) -> dict[str, str]:
    """Return the reason for each key without effect or refused, itself or by its section."""
    why = {path: key.refused or key.idle for path, key in table.items() if key.refused or key.idle}
    for path in table:
        section = path.rpartition(".")[0]
        if section in why:
            why.setdefault(path, why[section])
    return why


def _mend(path: str, known: Sequence[str], useless: Mapping[str, str]) -> str:
    section, _, name = path.rpartition(".")
    if not known or len(name) > LONGEST_NAME:
        return "Remove it."
    if path in known:
        return "Write it as a section in a section, without the dot."
    siblings = {
        other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section
    }
    owning_stages = [
        other for other in known if other.rpartition(".")[2] == name and other not in useless
    ]
    near = get_close_matches(name, siblings, n=2, cutoff=0.5)
    if near and (not owning_stages or get_close_matches(name, near, cutoff=0.8)):
        likeness = [SequenceMatcher(None, name, other).ratio() for other in near]
        best = [
            other for other, ratio in zip(near, likeness, strict=True) if ratio == max(likeness)
        ]
        useful = [f'"{other}"' for other in best if siblings[other] not in useless]
        if not useful:
            return (
                f'Remove it: "{best[0]}", which is like it, does nothing here '
                f"({useless[siblings[best[0]]]})."
            )
        return f"Did you mean {' or '.join(useful)}?"
    return (
        f"Did you mean {' or '.join(owning_stages)}?"
        if 1 <= len(owning_stages) <= 3
        else "Remove it."
    )


def misfit(path: str, value: Any, key: Key) -> Problem:
    """Build the problem of a value that its key does not accept."""
    huge = key.kind == "int" and isinstance(value, int) and value.bit_length() > 63
    return Problem(path, f"saw {show(value)}", key.expected + " in 64 bits" * huge)


LONGEST_NAME = 100
"""The most characters of a key's name for which similar keys are searched."""
_NOUNS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dtype": '"fp32", "bf16" or "fp16"',
    "list": "a list",
    "any": "anything",
    "section": "a section {...}",
}
_FLAGS = {word: truth for truth, words in ((True, "1 true t yes y on"), (False, ("0 false f no n "
                                                                                "off")))
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
    if not number.is_integer() or abs(number) > 2**63:
        raise ValueError
    return value if isinstance(value, int) else int(number)


def _dtype(value: Any) -> str:
    if not isinstance(value, str) or value.lower().removeprefix("torch.") not in _DTYPES:
        raise ValueError
    return value.lower()


_DTYPES = ("fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16")


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
    "dtype": _dtype,
    "list": _instance(list),
    "section": _instance(dict),
    "any": lambda value: value,
}
