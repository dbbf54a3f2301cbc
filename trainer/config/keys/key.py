"""A key: the one row that says what it takes, who honours it, and where its default comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.errors import show

AUTO = "auto"
UNITS = (
    *("tokens", "samples", "records", "classes", "epochs", "pixels", "degrees"),
    *("steps", "micro-batches", "evaluations", "checkpoints", "iterations", "seconds"),
    *("bytes", "bits", "buffers", "requests", "elements", "parameters", "dimensions", "groups"),
    *("ranks", "stages", "processes", "threads", "multiprocessors", "queues"),
    *("layers", "modules", "levels"),
    *("learning rate", "norm", "share", "factor", "powers of 2", "stairs", "number"),
)
"""The units of keys with numbers; a `share` is from 0 to 1, and `number` has no unit."""


@dataclass(frozen=True)
class Recipes:
    """The recipes that honour a key, by name; the others refuse it."""

    names: tuple[str, ...]
    accepts: Callable[[object], bool] = lambda value: False
    """Returns True for a value that every recipe takes."""
    accepted: str = ""
    """Those values, in words."""


@dataclass(frozen=True)
class Excludes:
    """Another key that can't be given together with a key, except for some recipes."""

    other: str
    hint: str = ""
    but_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Values:
    """The values that a key may hold."""

    kind: str = "any"
    """A kind of `NOUNS`; for a key of ours that takes several types, the kind of its numbers."""
    unit: str = ""
    """The unit of its numbers, one of `UNITS`."""
    low: float | None = None
    high: float | None = None
    above: bool = False
    """True if `low` itself is not allowed."""
    choices: tuple[str, ...] = ()
    auto: bool = False
    """True if "auto" is accepted, which `resolve` replaces."""
    when_auto: object = None
    """The value in place of "auto", which is that of Hugging Face's Trainer; None: computed."""
    null: bool = False
    needed: bool = False
    """True if the key must be given."""
    words: str = ""
    """The values in words; only for a key of ours, whose values have a Python type."""

    @property
    def expected(self) -> str:
        """The accepted values in words, e.g. `a whole number of at least 1 or "auto"`."""
        if self.words:
            return self.words
        text = " or ".join(f'"{choice}"' for choice in self.choices) or NOUNS[self.kind]
        if self.high is not None:
            text += f" from {self.low:,.15g} to {self.high:,.15g}"
        elif self.low is not None:
            text += f" above {self.low:g}" if self.above else f" of at least {self.low:g}"
        return text + ' or "auto"' * self.auto + " or null" * self.null


@dataclass(frozen=True)
class Support:
    """The engines and recipes that honour a key, and what happens with others."""

    usual: tuple[object, ...] = ()
    """The values that ask only for what is done anyway; empty: those that switch the key off."""
    idle: str = ""
    """The reason why the key has no effect here; it is then not passed to DeepSpeed."""
    refused: str = ""
    """The reason why the key is an error unless it is switched off; and what to do."""
    instead: str = ""
    """The behaviour of the engines that do not honour the key, all but DeepSpeed."""
    changes_numbers: bool = False
    """True if those engines would compute other numbers, and therefore refuse the key."""
    needs: str = ""
    """The condition, in `rules.unmet`, without which the key has no effect."""
    excludes: Excludes | None = None
    recipes: Recipes | None = None
    """None: all recipes."""


@dataclass(frozen=True)
class Key(Support, Values):
    """A row of a table, or the mark of a field in `sections/`, which the field's type completes."""

    about: str = ""
    """The meaning of a key of ours; that of DeepSpeed's is in DeepSpeed's manual."""
    default: object = None
    """The default; for DeepSpeed's keys, DeepSpeed's own. None if the key may stay missing."""
    differs: str = ""
    """The reason why the default here is not DeepSpeed's."""
    now: str = ""
    """The present name of an old key; an offload under an old name is to the CPU."""
    switch: str = ""
    """The key that switches a section on; without it, the section is off."""

    def asks(self, value: object) -> bool:
        """Return True if `value` asks for something that is not done anyway."""
        if value is None or value == AUTO:
            return False
        number = self.kind in ("int", "float", "any") and not isinstance(value, bool | list | dict)
        return value not in self.usual if self.usual or number else not is_off(value)

    def below(self, section: Key) -> Key:
        """Return this key as one of a section, whose `instead` applies to it, too."""
        if self.instead or not section.instead:
            return self
        return replace(self, instead=section.instead, changes_numbers=section.changes_numbers)

    def sentences(self) -> Iterator[str]:
        """Yield what `meshloom schema` says of a key besides its values and its meaning."""
        if self.unit:
            yield f"Unit: {self.unit}."
        yield from self.facts()

    def facts(self) -> Iterator[str]:
        """Yield what docs/reference.md says of a key besides its values, unit and meaning."""
        if self.now:
            yield f"Old name of `{self.now}`."
        if self.refused:
            yield f"Refused: {self.refused}."
        if self.idle:
            yield f"No effect: {self.idle}."
        if self.instead:
            effect = "refused" if self.changes_numbers else "no effect"
            yield f"Only `deepspeed`; {effect} elsewhere: {self.instead}."
        if self.recipes:
            yield f"For {', '.join(f'`{name}`' for name in self.recipes.names)}."
        if self.needs:
            yield f"Needs {self.needs}."
        if self.excludes:
            yield f"Not with `{self.excludes.other}`."
        if self.when_auto is not None:
            yield f'"auto" stands for {show(self.when_auto)}.'
        if self.differs:
            yield f"Default differs from DeepSpeed's: {self.differs}."


Table = Mapping[str, Key]
"""Keys by their dotted paths."""
NOUNS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dtype": '"fp32", "bf16" or "fp16"',
    "list": "a list",
    "any": "anything",
    "section": "a section {...}",
}
FLAGS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}
"""DeepSpeed's names of dtypes, with or without "torch.", and the one to which each is converted."""


def coerce(value: Any, key: Values) -> object:
    """Convert `value` to the key's type as DeepSpeed does: 5e8 to an int, "1e-5" to a float.

    Raises ValueError if the value does not fit.
    """
    if (value == AUTO and key.auto) or (value is None and key.null):
        return value
    value = cast(value, key.kind)
    if key.choices:
        value = {choice.lower(): choice for choice in key.choices}.get(value.lower(), "")
        if not value:
            raise ValueError
    if key.low is not None and (value < key.low or (key.above and value == key.low)):
        raise ValueError
    if key.high is not None and value > key.high:
        raise ValueError
    return value


def cast(value: object, kind: str) -> object:
    """Convert a value to a kind of `NOUNS`. Raises ValueError."""
    return _CASTS[kind](value)


def is_off(value: object) -> bool:
    """Return True if a section or a flag asks for nothing: false, null, empty, or not enabled."""
    return not value or (isinstance(value, dict) and value.get("enabled", True) in (False, AUTO))


def _bool(value: object) -> bool:
    if isinstance(value, list | dict) or str(value).lower() not in FLAGS:
        raise ValueError
    return FLAGS[str(value).lower()]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(number):
        raise ValueError
    return number


def _int(value: object) -> int:
    number = _number(value)
    if not number.is_integer() or abs(number) > 2**63:
        raise ValueError
    return value if isinstance(value, int) else int(number)


def _dtype(value: object) -> str:
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if name not in DTYPES:
        raise ValueError
    return DTYPES[name]


def _instance(kind: type) -> Callable[[object], object]:
    def checked(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return checked


_CASTS: dict[str, Callable[[object], object]] = {
    "bool": _bool,
    "int": _int,
    "float": _number,
    "str": _instance(str),
    "dtype": _dtype,
    "list": _instance(list),
    "section": _instance(dict),
    "any": lambda value: value,
}
