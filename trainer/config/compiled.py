"""The compiled config, and `load`, which makes it from a JSON file or says everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.check import check
from trainer.config.keys import KEYS
from trainer.config.modern import modernise
from trainer.config.read import Json, leaves, override, read
from trainer.config.rules import conflicts, notes_of
from trainer.config.sections import TrainerSection, known_keys, validate
from trainer.errors import ConfigError

FILE, OVERRIDE, DEFAULT = "config file", "override", "default"


@dataclass(frozen=True)
class Choice:
    """An optimizer or a scheduler: DeepSpeed's name of it, and its parameters."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Config:
    """What the user wrote, complete and checked. Compiled by `load`, its "auto" values filled by `resolve`."""

    path: Path
    raw: Json
    """The JSON as given, with the overrides."""
    trainer: TrainerSection
    settings: Json
    """All of DeepSpeed's keys under their present names, the scheduler included."""
    origins: dict[str, str]
    """Where each value came from, by key path: `config file`, `override`, `default` or `auto: from ...`."""
    notes: tuple[str, ...] = ()
    """One line for each key that was accepted and has no effect here."""

    @property
    def deepspeed(self) -> Json:
        """A DeepSpeed JSON; without the scheduler, because the loop computes the learning rate."""
        return deepcopy({key: value for key, value in self.settings.items() if key != "scheduler"})

    @property
    def optimizer(self) -> Choice:
        return Choice(**deepcopy({key: self.settings["optimizer"][key] for key in ("type", "params")}))

    @property
    def scheduler(self) -> Choice | None:
        return Choice(**deepcopy(self.settings["scheduler"])) if "scheduler" in self.settings else None


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Compile the DeepSpeed JSON at `path` with `key.path=value` overrides.

    Raises one ConfigError with every problem of the file, the overrides and the values.
    """
    path = Path(path)
    raw, overridden, problems = override(read(path), overrides)
    trainer, trainer_problems = validate(raw.get("trainer", {}))
    checked = check({key: value for key, value in raw.items() if key != "trainer"}, KEYS, ("trainer", *known_keys()))
    problems += [*trainer_problems, *checked.problems]
    modern = modernise(checked.values, trainer, raw)
    problems += [*modern.problems, *conflicts(modern.settings)]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    origins = {name: DEFAULT for name, _ in leaves({"trainer": modern.trainer.model_dump()})}
    origins |= dict.fromkeys((name for name, _ in leaves(modern.settings)), FILE)
    origins |= {name: FILE for name, _ in leaves(raw)}
    origins |= {
        name: OVERRIDE for name in origins if any(name == over or name.startswith(over + ".") for over in overridden)
    }
    notes = (*checked.notes, *modern.notes, *notes_of(modern.settings))
    return Config(path, raw, modern.trainer, modern.settings, origins | modern.origins, notes)
