"""A model that is measured before a run's own is built, a teacher, and then leaves memory."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from trainer.config import Config
from trainer.errors import ConfigError, Problem
from trainer.recipe import recipe_of
from trainer.run.prepare import prepare
from trainer.run.session import Session
from trainer.supervise.stall import Phase


def precursor_of(config: Config, folder: Path | None) -> Config | None:
    """Return the config of what is measured before a run in `folder` is built; None: nothing.

    Raises ConfigError, without a folder also for a recipe that measures nothing.
    """
    recipe = recipe_of(config.trainer, None)
    if (measured := getattr(recipe, "precursor", None)) is not None:
        return measured(config, folder)  # type: ignore[no-any-return]
    if folder is None:
        actual = f'"{config.trainer.task}", which has no teacher'
        raise ConfigError(Problem("trainer.task", actual, '"distillation"'))
    return None


def measure_precursor(session: Session, config: Config, folder: Path | None) -> None:
    """Build what the recipe measures first, in the layout of `config`, and have it measured.
    Collective.

    `folder`: that of the run; None: nothing else is to be done. Raises ConfigError or DataError.
    """
    machine = session.machine
    own = session.ranks.on_own(lambda: precursor_of(config, folder))
    # a machine whose folder is its own may lack what others have
    first = session.ranks.lowest(own)
    if first is None:
        if folder is None:
            session.say("the teacher's column is there already")
        return
    _, measured = first
    prepared = prepare(measured, machine, None, session.console)
    session.enter(Phase.BUILDING)
    machine.signs.at("building the teacher")
    machine.watch.moves(prepared.save_seconds)
    engine = prepared.engine.kind.build(prepared.job(machine))
    prepared.subject.spec.building.weights.release()
    done = prepared.before_training(engine, folder or Path(), 0)
    machine.signs.hide()
    for note in done.subject.notes:
        session.say(f"note: {note}")
    engine.close()
    del engine, prepared, done
    gc.collect()
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
