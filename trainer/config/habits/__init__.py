"""Configs of other trainers as ours: what Axolotl, LLaMA-Factory and Hugging Face's Trainer are told.

Which key of theirs becomes which of ours is data: `axolotl`, `llamafactory` and `arguments` have the tables, `training`
and `sources` the functions for keys that belong together, `draft` the notation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.compiled import load
from trainer.config.habits import arguments, axolotl, llamafactory
from trainer.config.habits.draft import Draft, Group, Row, fill
from trainer.config.habits.reading import read_arguments
from trainer.config.habits.training import section_of
from trainer.config.read import Json
from trainer.config.sections import Section, TrainerSection

__all__ = ["SYSTEMS", "Draft", "translate"]


class System(NamedTuple):
    """What another trainer is told: its keys, what it does where it is not told, and keys that go together."""

    table: Mapping[str, Row]
    defaults: Callable[[Json], Json]
    groups: Mapping[str, Group]


SYSTEMS = {
    "axolotl": System(axolotl.TABLE, axolotl.defaults, axolotl.GROUPS),
    "llamafactory": System(llamafactory.TABLE, llamafactory.defaults, llamafactory.GROUPS),
    "trainer": System(arguments.TABLE, arguments.defaults, arguments.SCRIPTS),
}


def translate(system: str, path: Path) -> Draft:
    """Their file as our config, in `made`, with what is to be said of each key.

    Raises ConfigError for a file that can't be read, a training that is another one, and values that ours does not
    take.
    """
    table, defaults, groups = SYSTEMS[system]
    given = read_arguments(path)
    base = section_of("deepspeed", given.get("deepspeed"), path.parent)
    draft = Draft(given, path.parent, base=base, made=deepcopy(base))
    fill(draft, table, defaults({key: value for key, value in given.items() if value is not None}), groups)
    draft.made = _ordered(draft.made)
    load(draft.made)
    return draft


_FIRST = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_THEN = ("bf16", "fp16", "zero_optimization", "optimizer", "scheduler")


def _ordered(made: Json) -> Json:
    """Batches, precision, layout, optimizer, what else DeepSpeed knows, and the section `trainer` in its own order."""
    rest = [key for key in made if key not in (*_FIRST, *_THEN, "trainer")]
    found = {key: made[key] for key in (*_FIRST, *_THEN, *rest) if key in made}
    return {**found, "trainer": _by_fields(TrainerSection, made.get("trainer", {}))}


def _by_fields(section: type[Section], values: Json) -> Json:
    ordered = {}
    for name, field in section.model_fields.items():
        if name in values:
            inner: Any = field.annotation
            below = isinstance(values[name], dict) and isinstance(inner, type) and issubclass(inner, Section)
            ordered[name] = _by_fields(inner, values[name]) if below else values[name]
    return ordered | {name: value for name, value in values.items() if name not in ordered}
