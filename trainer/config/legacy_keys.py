"""Converts checked keys of older configs into present ones, and fills in missing ones."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from trainer.config.check import Checked
from trainer.config.choices import DEFAULT_OPTIMIZER, Chosen, choose_optimizer, choose_scheduler
from trainer.config.keys import DIFFERS, KEYS, RECOMPUTES, RENAMED
from trainer.config.keys.key import AUTO
from trainer.config.rules import unswitched
from trainer.config.sections.trainer import TrainerSection
from trainer.errors import Problem
from trainer.storage import Json


@dataclass
class Upgraded:
    """Settings under present names, with the record of the conversion."""

    settings: Json
    trainer: TrainerSection
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def replace_zero_flag(self) -> None:
        """Replace `"zero_optimization": true`, an old form, by stage 1; false by stage 0."""
        zero = self.settings.get("zero_optimization")
        if isinstance(zero, bool):
            self.settings["zero_optimization"] = {"stage": int(zero)}
            origin = f"auto: from zero_optimization {str(zero).lower()}"
            self.origins["zero_optimization.stage"] = origin

    def rename(self) -> None:
        """Move the values of old names to the present ones."""
        for old, new in RENAMED.items():
            section, _, name = old.rpartition(".")
            values = self.settings.get(section, {}) if section else self.settings
            if name not in values:
                continue
            value = values.pop(name)
            target = new.rpartition(".")[2]
            place = new
            if KEYS[old].kind == "bool" and KEYS[new].kind == "section":
                if not value:
                    continue
                value = {"device": "cpu"}
                place = f"{new}.device"
            if target in values:
                actual = f'saw it beside "{new}"'
                self.problems.append(Problem(old, actual, "one of the two", f"Remove {old}."))
            values[target] = value
            self.origins[place] = f"auto: from {old}"

    def drop_idle_sections(self) -> None:
        """Drop an offload of parameters below ZeRO-3, and a communication log that is off."""
        zero = self.settings.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        section = zero.get("offload_param") or {}
        if stage != 3 and section.get("device", "none") not in ("none", AUTO):
            del zero["offload_param"]
            place = "zero_optimization.offload_param"
            self.notes.append(f"{place} has no effect here: the ZeRO stage is {stage}")
        self.notes.extend(unswitched(self.settings))
        if self.settings.get("comms_logger", {}).get("enabled") is not True:
            # if the section is present, DeepSpeed logs, and waits for each operation
            self.settings.pop("comms_logger", None)

    def shard_as_mics(self) -> None:
        """Take the shard size of MiCS, which DeepSpeed removed, as that of the mesh."""
        place = "zero_optimization.mics_shard_size"
        size = self.settings.get("zero_optimization", {}).pop("mics_shard_size", -1)
        if size < 1:
            return
        mesh = self.trainer.mesh
        if mesh.shard not in (None, size):
            actual = f"saw {size} beside trainer.mesh.shard {mesh.shard}"
            self.problems.append(Problem(place, actual, "one size of a shard"))
        sized = mesh.model_copy(update={"shard": size})
        self.trainer = self.trainer.model_copy(update={"mesh": sized})
        self.origins["trainer.mesh.shard"] = f"auto: from {place}"

    def recompute(self, checked: Checked) -> None:
        """Recompute every block if DeepSpeed's keys ask for it, and `trainer` says nothing.

        DeepSpeed recomputes groups of `activation_checkpoint_interval` layers as one; here each
        block is recomputed by itself, which gives the same gradient.
        """
        interval = self.settings.get("pipeline", {}).pop("activation_checkpoint_interval", 0)
        if any(place.startswith(RECOMPUTES) for place in checked.idle):
            origin = "the activation_checkpointing section"
        elif interval > 0:
            origin = "pipeline.activation_checkpoint_interval"
        else:
            return
        if "activation_checkpointing" not in self.trainer.model_fields_set:
            mode = "offload" if f"{RECOMPUTES}cpu_checkpointing" in checked.idle else "full"
            self.trainer = self.trainer.model_copy(update={"activation_checkpointing": mode})
            self.origins["trainer.activation_checkpointing"] = f"auto: from {origin}"

    def fill(self) -> None:
        """Check the optimizer and the scheduler, and fill in defaults."""
        given: Json = self.settings.get("optimizer") or {}
        optimizer = choose_optimizer(deepcopy(given or DEFAULT_OPTIMIZER))
        self._take("optimizer", optimizer)
        origin = "default" if given else f"default: {DIFFERS['optimizer']}"
        if not optimizer.problems:
            filled = set(optimizer.section["params"]) - set(given.get("params", {}))
            self.origins.update({f"optimizer.params.{name}": origin for name in filled})
        if not given:
            self.origins["optimizer.type"] = origin
        scheduler = self.settings.pop("scheduler", {})
        if scheduler.get("type") is not None or scheduler.get("params"):
            self._take("scheduler", choose_scheduler(scheduler))
        for name, key in KEYS.items():
            if key.default is not None and name not in self.settings:
                self.settings[name] = key.default
                self.origins[name] = "default"

    def _take(self, name: str, chosen: Chosen) -> None:
        self.settings[name] = chosen.section
        self.problems.extend(chosen.problems)
        self.notes.extend(chosen.notes)


def upgrade(checked: Checked, trainer: TrainerSection) -> Upgraded:
    """Return the settings under present names, with the defaults of what is left out."""
    upgraded = Upgraded(deepcopy(checked.values), trainer)
    upgraded.replace_zero_flag()
    upgraded.rename()
    upgraded.shard_as_mics()
    upgraded.drop_idle_sections()
    upgraded.recompute(checked)
    upgraded.fill()
    return upgraded
