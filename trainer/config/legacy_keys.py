"""Converts keys of older configs into DeepSpeed's present ones, and fills in missing ones."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from trainer.config.check import Checked
from trainer.config.choices import DEFAULT_OPTIMIZER, choose_optimizer, choose_scheduler
from trainer.config.keys import DIFFERS, KEYS, OFFLOADS, RECOMPUTES, RENAMED
from trainer.config.read import Json
from trainer.config.rules import unswitched
from trainer.config.sections import TrainerSection
from trainer.errors import Problem


@dataclass
class Upgraded:
    """Settings under present names, with the record of the conversion."""

    settings: Json
    trainer: TrainerSection
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def upgrade(checked: Checked, trainer: TrainerSection) -> Upgraded:
    """Return the settings under present names, with the optimizer and gradient clipping of a
    default run.
    """
    upgraded = Upgraded(deepcopy(checked.values), trainer)
    _zero_section(upgraded)
    _rename(upgraded)
    _offload(upgraded)
    _mics(upgraded)
    upgraded.notes.extend(unswitched(upgraded.settings))
    if upgraded.settings.get("comms_logger", {}).get("enabled") is not True:
        upgraded.settings.pop(
            "comms_logger", None
        )  # if it is present, DeepSpeed logs, and waits for each operation
    idle = any(place.startswith(RECOMPUTES) for place in checked.idle)
    _recompute(upgraded, "the activation_checkpointing section", idle)
    # DeepSpeed recomputes groups of so many layers as one; here each block is one, for the same
    # gradient
    interval = upgraded.settings.get("pipeline", {}).pop("activation_checkpoint_interval", 0)
    _recompute(upgraded, "pipeline.activation_checkpoint_interval", interval > 0)
    _fill(upgraded)
    return upgraded


def _zero_section(upgraded: Upgraded) -> None:
    zero = upgraded.settings.get("zero_optimization")
    if isinstance(zero, bool):
        upgraded.settings["zero_optimization"] = {"stage": int(zero)}
        upgraded.origins["zero_optimization.stage"] = (
            f"auto: from zero_optimization {str(zero).lower()}"
        )


def _rename(upgraded: Upgraded) -> None:
    for old, new in RENAMED.items():
        section, _, name = old.rpartition(".")
        values = upgraded.settings.get(section, {}) if section else upgraded.settings
        if name not in values:
            continue
        target = new.rpartition(".")[2]
        if target in values:
            upgraded.problems.append(
                Problem(old, f'saw it beside "{new}"', "one name for one key", f"Remove {old}.")
            )
        values[target] = values.pop(name)
        upgraded.origins[new] = f"auto: from {old}"


def _offload(upgraded: Upgraded) -> None:
    zero = upgraded.settings.get("zero_optimization", {})
    for old, new in OFFLOADS.items():
        if not zero.pop(old, None):
            continue
        place = f"zero_optimization.{old}"
        if new in zero:
            upgraded.problems.append(
                Problem(place, f'saw it beside "{new}"', "one of the two", f"Remove {old}.")
            )
        zero[new] = {"device": "cpu"}
        upgraded.origins[f"zero_optimization.{new}.device"] = f"auto: from {place}"
    stage, section = zero.get("stage", 0), zero.get("offload_param") or {}
    if stage != 3 and section.get("device", "none") not in ("none", "auto"):
        del zero["offload_param"]
        upgraded.notes.append(
            f"zero_optimization.offload_param has no effect here: the ZeRO stage is {stage}"
        )


def _mics(upgraded: Upgraded) -> None:
    place = "zero_optimization.mics_shard_size"
    size = upgraded.settings.get("zero_optimization", {}).pop("mics_shard_size", -1)
    if size < 1:
        return
    mesh = upgraded.trainer.mesh
    if mesh.shard not in (None, size):
        seen = f"saw {size} beside trainer.mesh.shard {mesh.shard}"
        upgraded.problems.append(Problem(place, seen, "one size of a shard"))
    upgraded.trainer = upgraded.trainer.model_copy(
        update={"mesh": mesh.model_copy(update={"shard": size})}
    )
    upgraded.origins["trainer.mesh.shard"] = f"auto: from {place}"


def _recompute(upgraded: Upgraded, place: str, idle: bool) -> None:
    if idle and "activation_checkpointing" not in upgraded.trainer.model_fields_set:
        upgraded.trainer = upgraded.trainer.model_copy(update={"activation_checkpointing": "full"})
        upgraded.origins["trainer.activation_checkpointing"] = f"auto: from {place}"


def _fill(upgraded: Upgraded) -> None:
    settings = upgraded.settings
    given = settings.get("optimizer")
    settings["optimizer"], problems, notes = choose_optimizer(deepcopy(given or DEFAULT_OPTIMIZER))
    upgraded.problems.extend(problems)
    upgraded.notes.extend(notes)
    names = (
        set(settings["optimizer"]["params"]) - set((given or {}).get("params", {}))
        if not problems
        else set()
    )
    origin = "default" if given else f"default: {DIFFERS['optimizer']}"
    upgraded.origins.update({f"optimizer.params.{name}": origin for name in names})
    if not given:
        upgraded.origins["optimizer.type"] = origin
    scheduler = settings.pop("scheduler", {})
    if scheduler and (scheduler.get("type") or scheduler.get("params")):
        settings["scheduler"], problems, notes = choose_scheduler(scheduler)
        upgraded.problems.extend(problems)
        upgraded.notes.extend(notes)
    for name, key in KEYS.items():
        if key.default is not None and name not in settings:
            settings[name] = key.default
            upgraded.origins[name] = "default"
