"""The compiled config, and `load`, which makes it from a JSON or reports all that is wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from trainer.config.check import check
from trainer.config.keys import KEYS
from trainer.config.legacy_keys import upgrade
from trainer.config.read import leaves, other_config, override, read, shipped, unfit
from trainer.config.rules import (
    EVERYWHERE,
    conflicts,
    contradictions,
    give_way,
    notes_of,
    within,
)
from trainer.config.sections.trainer import TrainerSection
from trainer.config.validate import validate
from trainer.errors import ConfigError
from trainer.storage import Json

FILE = "config file"
OVERRIDE = "override"
DEFAULT = "default"


@dataclass(frozen=True)
class Choice:
    """An optimizer or a scheduler: DeepSpeed's name for it, and its parameters."""

    type: str
    params: Json


@dataclass(frozen=True)
class Config:
    """The user's config, complete and checked; `resolve` replaces its "auto" values."""

    path: Path
    raw: Json
    """The JSON as given, with the overrides."""
    trainer: TrainerSection
    settings: Json
    """All of DeepSpeed's keys under their present names, with the scheduler."""
    origins: dict[str, str]
    """The origin of each value: `config file`, `override`, `default` or `auto`, with a reason."""
    notes: tuple[str, ...] = ()
    """A line for each key that was accepted and has no effect here."""

    @property
    def deepspeed(self) -> Json:
        """A DeepSpeed JSON without the scheduler, because the loop computes the learning rate."""
        return deepcopy({key: value for key, value in self.settings.items() if key != "scheduler"})

    @property
    def optimizer(self) -> Choice:
        section = deepcopy(self.settings["optimizer"])
        return Choice(section["type"], section["params"])

    @property
    def scheduler(self) -> Choice | None:
        section = deepcopy(self.settings.get("scheduler"))
        return None if section is None else Choice(**section)


def load(source: str | Path | Json, overrides: Sequence[str] = ()) -> Config:
    """Compile a DeepSpeed config: a JSON or YAML file, a shipped config's name, or a dictionary.

    `overrides` are `key.path=value`. Raises ConfigError; if the file can be read, with all problems
    of the config and of the overrides together.
    """
    path = Path("run") if isinstance(source, dict) else path_of(source)
    given = deepcopy(source) if isinstance(source, dict) else read(path)
    if isinstance(source, dict) and (wrong := [*unfit(given, "the config")]):
        raise ConfigError(*wrong)
    if strange := other_config(path, given, {"trainer", *KEYS}):
        raise strange
    raw, overridden, problems = override(given, overrides)
    gone, gone_notes = give_way(raw, overridden)
    trainer, trainer_problems = validate(raw.get("trainer", {}), str(path.parent))
    theirs = {key: value for key, value in raw.items() if key != "trainer"}
    checked = check(theirs, KEYS, EVERYWHERE)
    problems += [*trainer_problems, *checked.problems]
    upgraded = upgrade(checked, trainer)
    problems += [*upgraded.problems, *conflicts(upgraded.settings)]
    problems += contradictions(upgraded.settings, trainer)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    origins = {name: DEFAULT for name, _ in leaves({"trainer": upgraded.trainer.model_dump()})}
    origins |= dict.fromkeys((name for name, _ in leaves(upgraded.settings)), FILE)
    origins |= {name: FILE for name, _ in leaves(raw)}
    replaced = [name for name in origins if any(within(name, over) for over in overridden)]
    origins |= dict.fromkeys(replaced, OVERRIDE) | upgraded.origins | gone
    notes = (*gone_notes, *checked.notes, *upgraded.notes, *notes_of(upgraded.settings, trainer))
    return Config(path, raw, upgraded.trainer, upgraded.settings, origins, notes)


def path_of(source: str | Path) -> Path:
    """Return the path if it exists, else that of the shipped config of this name."""
    return Path(source) if os.path.lexists(source) else shipped(str(source)) or Path(source)
