"""Conversion of the configs of Axolotl, LLaMA-Factory and Hugging Face's Trainer.

What becomes of each foreign key is data, in a YAML file for each system; functions convert keys
that belong together. A key that changes the training and has no equivalent here is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from trainer.config.compiled import load
from trainer.config.sections.trainer import TrainerSection
from trainer.errors import ConfigError, Problem
from trainer.storage import Json
from trainer.tools.importers import arguments, axolotl, llamafactory
from trainer.tools.importers.answers import axolotl_answers, llamafactory_answers, trl
from trainer.tools.importers.draft import Draft
from trainer.tools.importers.shared_keys import section_of
from trainer.tools.importers.tables import OtherTrainer, fill, read_table, table

__all__ = ["SYSTEMS", "Draft", "translate"]


SYSTEMS = {
    "axolotl": OtherTrainer(table("axolotl"), axolotl.defaults, axolotl.GROUPS),
    "llamafactory": OtherTrainer(table("llamafactory"), llamafactory.defaults, llamafactory.GROUPS),
    "trainer": OtherTrainer(table("arguments"), arguments.defaults, arguments.SCRIPTS),
    **trl.TRAINERS,
}
OF_ANSWERS: Mapping[str, Callable[[Json], OtherTrainer | None]] = {
    "axolotl": axolotl_answers.trainer_of,
    "llamafactory": llamafactory_answers.trainer_of,
}
"""Systems where a key asks for preferences or rewards -> a function that returns the trainer of it.

It returns None without that key."""


def translate(
    system: str, given: Json, folder: Path, partial: bool = False, template: str = ""
) -> Draft:
    """Translate the foreign keys `given` into a config, in `made`, with a report on each key.

    `system`: a name in SYSTEMS. `folder`: the folder of the foreign file. `template`: the path that
    the config gets for a chat template whose text is in theirs. The caller writes that text, which
    is `Draft.template`.

    Raises ConfigError for another kind of training, for values that this trainer does not take,
    for lost keys that decide which parameters are trained or on which loss, and, unless `partial`,
    for any lost key.
    """
    set_keys = {key: value for key, value in given.items() if value is not None}
    of_answers = OF_ANSWERS[system](set_keys) if system in OF_ANSWERS else None
    rules, defaults, groups = of_answers or SYSTEMS[system]
    base = section_of("deepspeed", given.get("deepspeed"), folder)
    path = template or Draft.template_path
    draft = Draft(given, folder, base=base, made=deepcopy(base), template_path=path)
    fill(draft, rules, defaults(set_keys), groups)
    draft = replace(draft, made=_ordered(draft.made))
    dropped = {line: why for line, why in draft.lost.items() if line not in draft.carried}
    deciding = {line: why for line, why in dropped.items() if decides(line.partition(" ")[0])}
    if partial and deciding:
        hint = "--partial can't leave these out: the rest would train something else."
        raise ConfigError(*_refusals(deciding, hint))
    if draft.lost and not partial:
        hint = "Remove these keys, or give --partial, which writes the rest and lists them."
        raise ConfigError(*_refusals(draft.lost, hint))
    load(draft.made)
    return draft


_DECIDING = re.compile("|".join(read_table("arguments")["deciding"]))


def decides(key: str) -> bool:
    """Return True if a foreign key says which parameters are trained, or on which loss."""
    return bool(_DECIDING.search(key))


def _refusals(lost: Mapping[str, Sequence[str]], hint: str) -> list[Problem]:
    problems = []
    for line, reasons in lost.items():
        key, _, value = line.partition(" ")
        actual = f"saw {value} ({'; '.join(reasons)})"
        problems.append(Problem(key, actual, "a key that has a counterpart here"))
    actual = f"{len(problems)} of their keys, which would change what is trained"
    return [Problem("not imported", actual, "none", hint), *problems]


_FIRST = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
    "zero_optimization",
    "optimizer",
    "scheduler",
)


def _ordered(made: Json) -> Json:
    """Sort keys: those of `_FIRST`, other keys of DeepSpeed, then `trainer` in its own order."""
    section = made.get("trainer", {})
    order = [*_FIRST, *(key for key in made if key not in (*_FIRST, "trainer"))]
    ordered = {name: section[name] for name in TrainerSection.model_fields if name in section}
    return {**{key: made[key] for key in order if key in made}, "trainer": ordered}
