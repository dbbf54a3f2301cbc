"""The grammar of a key table (keys.txt explains it), and the checks of a value against its key."""

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
class Values:
    """The values that a key may hold."""

    kind: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    """True if `low` itself is not allowed."""
    choices: tuple[str, ...] = ()
    auto: bool = False
    null: bool = False
    needed: bool = False
    """True if the key must be given."""

    @property
    def expected(self) -> str:
        """The accepted values in words, e.g. `a whole number of at least 1 or "auto"`."""
        text = " or ".join(f'"{choice}"' for choice in self.choices) or _NOUNS[self.kind]
        if self.high is not None:
            text += f" from {self.low:,.15g} to {self.high:,.15g}"
        elif self.low is not None:
            text += f" above {self.low:g}" if self.above else f" of at least {self.low:g}"
        return text + ' or "auto"' * self.auto + " or null" * self.null


@dataclass(frozen=True)
class Key(Values):
    """A row of a table: the values of a key, and the facts about it."""

    default: Any = None
    """DeepSpeed's own default; None if the key may stay missing."""
    usual: tuple[Any, ...] = ()
    """The values that ask only for what is done anyway; without any, those that switch it off."""
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
    excludes: str = ""
    """Another key that can't be given with it."""
    now: str = ""
    """The present name of an old key; an offload of an old name is to the CPU."""
    switch: str = ""
    """The key that switches a section on; without it, the section is off."""
    differs: str = ""
    """The reason why the default here is not DeepSpeed's."""

    def asks(self, value: Any) -> bool:
        """Return True if `value` asks for something that is not done anyway."""
        if value is None or value == AUTO:
            return False
        number = self.kind in ("int", "float", "any") and not isinstance(value, bool | list | dict)
        return value not in self.usual if self.usual or number else not is_off(value)


Table = Mapping[str, Key]
"""Keys by their dotted paths."""


def parse(table: str) -> dict[str, Key]:
    """Parse a table; return its keys by their dotted path."""
    keys: dict[str, Key] = {}
    sections = [""]
    for line in re.sub(r"\n +", " ", table).splitlines():
        if not line or line.startswith("#"):
            continue
        names, values, *facts = line.split(" | ")
        key = Key(**_values(values), **_facts(facts, values.split()[0]))
        if names.startswith("["):
            sections = names.strip("[]").split()
            keys.update(dict.fromkeys(sections, key))
            continue
        for section in sections:
            whole = keys.get(section, key)
            if whole.instead and not key.instead:
                key = replace(key, instead=whole.instead, changes_numbers=whole.changes_numbers)
            keys.update({f"{section}.{name}".lstrip("."): key for name in names.split()})
    return keys


def _values(text: str) -> dict[str, Any]:
    kind, *words = text.split()
    fields: dict[str, Any] = {"kind": kind}
    for word in words:
        if word in ("auto", "null", "needed"):
            fields[word] = True
        elif match := re.fullmatch(r"(>=?)(.+)", word):
            fields.update(low=float(match[2]), above=match[1] == ">")
        elif match := re.fullmatch(r"(.+)\.\.(.+)", word):
            fields.update(low=float(match[1]), high=float(match[2]))
        else:
            fields["choices"] = tuple(word.split("|"))
    return fields


def _facts(facts: Sequence[str], kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for fact in facts:
        name, colon, text = fact.partition(": ")
        fields[name.replace(" ", "_")] = text if colon else True
    if "default" in fields:
        fields["default"] = json.loads(fields["default"])
    if "usual" in fields:
        fields["usual"] = tuple(_CASTS[kind](value) for value in fields["usual"].split(", "))
    return fields


def coerce(value: Any, key: Values) -> Any:
    """Convert `value` to the key's type as DeepSpeed does: 5e8 to an int, "1e-5" to a float.

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

    `useless` has the known paths that must not be suggested, each with the reason.
    """
    section = path.rpartition(".")[0]
    where = f'the section "{section}"' if section else "the top level"
    expected, mend = f"a known key of {where}", _mend(path, known, useless)
    return Problem(path, f"saw {show(value)}", expected, mend)


def useless(table: Table) -> dict[str, str]:
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
    named = (other for other in known if other.rpartition(".")[2] == name)
    elsewhere = sorted({other for other in named if other not in useless}, key=_depth)
    if (other := OTHER_NAMES.get(name)) in known:
        elsewhere = [str(other)]
    near = get_close_matches(name, siblings, n=2, cutoff=0.5)
    if elsewhere or section in TRAINS_OTHERWISE:
        near = [other for other in near if _is_typo(name, other)]
    if near:
        likeness = {other: SequenceMatcher(None, name, other).ratio() for other in near}
        best = [other for other in near if likeness[other] == max(likeness.values())]
        if useful := [f'"{other}"' for other in best if siblings[other] not in useless]:
            return f"Did you mean {' or '.join(useful)}?"
        why = useless[siblings[best[0]]]
        return f'Remove it: "{best[0]}", which is like it, does nothing here ({why}).'
    return f"Did you mean {' or '.join(elsewhere)}?" if 1 <= len(elsewhere) <= 3 else "Remove it."


def _depth(path: str) -> tuple[int, str]:
    return path.count("."), path


def _is_typo(name: str, other: str) -> bool:
    """Return True if a name is another one misspelt, and not one with other words."""
    one, two = name.split("_"), other.split("_")
    alike = len(one) == len(two) and all(
        SequenceMatcher(None, *pair).ratio() >= _TYPO for pair in zip(one, two, strict=True)
    )
    return alike or SequenceMatcher(None, "".join(one), "".join(two)).ratio() >= _SAME_LETTERS


def misfit(path: str, value: Any, key: Key) -> Problem:
    """Build the problem of a value that its key does not accept."""
    huge = key.kind == "int" and isinstance(value, int) and value.bit_length() > 63
    return Problem(path, f"saw {show(value)}", key.expected + " in 64 bits" * huge)


_TYPO, _SAME_LETTERS = 0.65, 0.95
"""How alike each word of a misspelt name is, and all letters where it is split otherwise."""
TRAINS_OTHERWISE = ("optimizer.params", "scheduler.params")
"""Sections where another key trains otherwise, so that only a misspelt one is suggested."""
OTHER_NAMES = {
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "batch_size": "train_batch_size",
    "dataset": "trainer.data.path",
    "eval_steps": "trainer.evaluation.every",
    "learning_rate": "optimizer.params.lr",
    "lora": "trainer.adapter",
    "peft": "trainer.adapter",
    "logging_steps": "trainer.log.every",
    "lora_alpha": "trainer.adapter.alpha",
    "lora_r": "trainer.adapter.r",
    "lr_scheduler_type": "scheduler.type",
    "max_grad_norm": "gradient_clipping",
    "max_length": "trainer.data.sequence_length",
    "max_seq_length": "trainer.data.sequence_length",
    "max_steps": "trainer.steps",
    "model_name_or_path": "trainer.model.name_or_path",
    "num_train_epochs": "trainer.epochs",
    "output_dir": "trainer.run.folder",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "save_steps": "trainer.checkpoint.every",
    "seq_length": "trainer.data.sequence_length",
    "warmup_steps": "scheduler.params.warmup_num_steps",
}
"""Other trainers' names of keys -> this one's."""
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
FLAGS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


def _bool(value: Any) -> bool:
    if isinstance(value, list | dict) or str(value).lower() not in FLAGS:
        raise ValueError
    return FLAGS[str(value).lower()]


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
    if not isinstance(value, str) or value.lower().removeprefix("torch.") not in DTYPES:
        raise ValueError
    return value.lower()


DTYPES = ("fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16")


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
