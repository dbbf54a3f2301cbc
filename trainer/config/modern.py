"""Turns what older configs say into what DeepSpeed's present keys say, and fills in what was left out."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from trainer.config.choices import DEFAULT_OPTIMIZER, choose_optimizer, choose_scheduler
from trainer.config.keys import RENAMED
from trainer.config.read import Json
from trainer.config.sections import TrainerSection
from trainer.errors import Problem

OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass
class Modern:
    """Settings under present names; what was done to get there."""

    settings: Json
    trainer: TrainerSection
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def modernise(checked: Json, trainer: TrainerSection, raw: Json) -> Modern:
    """`checked` settings under present names, with the optimizer and gradient clipping that a default run has.

    `raw` says which sections were given at all.
    """
    modern = Modern(deepcopy(checked), trainer)
    _zero_section(modern)
    _rename(modern)
    _offload(modern)
    _mics(modern)
    _recompute(modern, "the activation_checkpointing section", raw.get("activation_checkpointing"))
    # DeepSpeed recomputes runs of so many layers as one; here each block is one, for the same gradient
    interval = modern.settings.get("pipeline", {}).pop("activation_checkpoint_interval", 0)
    _recompute(modern, "pipeline.activation_checkpoint_interval", interval)
    _fill(modern)
    return modern


def _zero_section(modern: Modern) -> None:
    zero = modern.settings.get("zero_optimization")
    if isinstance(zero, bool):
        modern.settings["zero_optimization"] = {"stage": int(zero)}
        modern.origins["zero_optimization.stage"] = f"auto: from zero_optimization {str(zero).lower()}"


def _rename(modern: Modern) -> None:
    for old, new in RENAMED.items():
        section, _, name = old.rpartition(".")
        values = modern.settings.get(section, {}) if section else modern.settings
        if name not in values:
            continue
        target = new.rpartition(".")[2]
        if target in values:
            modern.problems.append(Problem(old, f'saw it beside "{new}"', "one name for one key", f"Remove {old}."))
        values[target] = values.pop(name)
        modern.origins[new] = f"auto: from {old}"


def _offload(modern: Modern) -> None:
    zero = modern.settings.get("zero_optimization", {})
    for old, new in OFFLOADS.items():
        if not zero.pop(old, None):
            continue
        place = f"zero_optimization.{old}"
        if new in zero:
            modern.problems.append(Problem(place, f'saw it beside "{new}"', "one of the two", f"Remove {old}."))
        zero[new] = {"device": "cpu"}
        modern.origins[f"zero_optimization.{new}.device"] = f"auto: from {place}"


def _mics(modern: Modern) -> None:
    place = "zero_optimization.mics_shard_size"
    size = modern.settings.get("zero_optimization", {}).pop("mics_shard_size", -1)
    if size < 1:
        return
    mesh = modern.trainer.mesh
    if mesh.shard not in (None, size):
        seen = f"saw {size} beside trainer.mesh.shard {mesh.shard}"
        modern.problems.append(Problem(place, seen, "one size of a shard"))
    modern.trainer = modern.trainer.model_copy(update={"mesh": mesh.model_copy(update={"shard": size})})
    modern.origins["trainer.mesh.shard"] = f"auto: from {place}"


def _recompute(modern: Modern, place: str, asked: Any) -> None:
    if asked and "activation_checkpointing" not in modern.trainer.model_fields_set:
        modern.trainer = modern.trainer.model_copy(update={"activation_checkpointing": "full"})
        modern.origins["trainer.activation_checkpointing"] = f"auto: from {place}"


def _fill(modern: Modern) -> None:
    settings = modern.settings
    given = settings.get("optimizer")
    settings["optimizer"], problems = choose_optimizer(deepcopy(given or DEFAULT_OPTIMIZER))
    modern.problems += problems
    names = set(settings["optimizer"]["params"]) - set((given or {}).get("params", {})) if not problems else set()
    modern.origins |= {f"optimizer.params.{name}": "default" for name in names}
    if not given:
        modern.origins["optimizer.type"] = "default"
    scheduler = settings.pop("scheduler", {})
    if scheduler and (scheduler.get("type") or scheduler.get("params")):
        settings["scheduler"], problems, notes = choose_scheduler(scheduler)
        modern.problems += problems
        modern.notes += notes
    if "gradient_clipping" not in settings:
        settings["gradient_clipping"] = 1.0
        modern.origins["gradient_clipping"] = "default"
