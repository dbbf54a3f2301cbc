"""Conversion of other trainers' configs: those of Axolotl, LLaMA-Factory and Hugging Face's
Trainer.

The handling of each foreign key is data, in a YAML file for each system; `training` and `sources`
have the functions for keys that belong together, `draft` records the results. A key that changes
the training and has no equivalent here is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainer.config.compiled import load
from trainer.config.read import Json
from trainer.config.sections import TrainerSection
from trainer.errors import ConfigError, Problem
from trainer.tools.importers import arguments, axolotl, llamafactory
from trainer.tools.importers.draft import Draft, Group, KeyRule, fill
from trainer.tools.importers.shared_keys import section_of

__all__ = ["SYSTEMS", "Draft", "translate"]


class OtherTrainer(NamedTuple):
    """Another trainer: its keys, its defaults, and its groups of keys that belong together."""

    table: Mapping[str, KeyRule]
    defaults: Callable[[Json], Json]
    groups: Mapping[str, Group]


SYSTEMS = {
    "axolotl": OtherTrainer(axolotl.TABLE, axolotl.defaults, axolotl.GROUPS),
    "llamafactory": OtherTrainer(llamafactory.TABLE, llamafactory.defaults, llamafactory.GROUPS),
    "trainer": OtherTrainer(arguments.TABLE, arguments.defaults, arguments.SCRIPTS),
}


def translate(system: str, given: Json, folder: Path, partial: bool = False) -> Draft:
    """Translate foreign keys into a config, in `made`, with a report on each key; `folder`: that of
    their file.

    Raises ConfigError for another kind of training, for values that this trainer does not take,
    and, unless `partial`, for lost keys that change what is trained.
    """
    table, defaults, groups = SYSTEMS[system]
    base = section_of("deepspeed", given.get("deepspeed"), folder)
    draft = Draft(given, folder, base=base, made=deepcopy(base))
    fill(
        draft,
        table,
        defaults({key: value for key, value in given.items() if value is not None}),
        groups,
    )
    draft = replace(draft, made=_ordered(draft.made))
    if draft.lost and not partial:
        raise ConfigError(*_refusals(draft.lost))
    load(draft.made)
    return draft


def _refusals(lost: Mapping[str, list[str]]) -> list[Problem]:
    found = []
    for line, reasons in lost.items():
        key, _, value = line.partition(" ")
        why = "; ".join(dict.fromkeys(filter(None, reasons)))
        found.append(
            Problem(
                key, f"saw {value}{f' ({why})' if why else ''}", "something that has a key here"
            )
        )
    mend = "Take them out of theirs, or give --partial: it writes the rest and lists them."
    seen = f"{len(found)} of theirs, which would change what is trained"
    return [Problem("not imported", seen, "all of it", mend), *found]


_FIRST = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
_THEN = ("bf16", "fp16", "zero_optimization", "optimizer", "scheduler")


def _ordered(made: Json) -> Json:
    """Sort keys: batches, precision, layout, optimizer, other keys of DeepSpeed, then `trainer` in
    its own order.
    """
    rest = [key for key in made if key not in (*_FIRST, *_THEN, "trainer")]
    found = {key: made[key] for key in (*_FIRST, *_THEN, *rest) if key in made}
    section = made.get("trainer", {})
    return {
        **found,
        "trainer": {name: section[name] for name in TrainerSection.model_fields if name in section},
    }
