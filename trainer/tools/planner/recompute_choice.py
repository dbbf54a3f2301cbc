"""The choice of a run's `trainer.activation_checkpointing` "auto", by its plan on its device."""

from __future__ import annotations

import subprocess

from trainer.engines import Machine
from trainer.errors import first_line
from trainer.recipe import Subject
from trainer.run.compose import Composed
from trainer.run.prepare import RecomputeChoice
from trainer.run.start.request import Planner
from trainer.storage import Json
from trainer.tools.planner import memory_check
from trainer.tools.planner.memory_check import check_memory, is_requested
from trainer.tools.planner.recompute_modes import MODES

UNPLANNED = "on a CPU memory is planned only if trainer.plan is given"


def choose_recompute(
    subject: Subject, composed: Composed, engine: str, machine: Machine
) -> RecomputeChoice:
    """Choose the cheapest mode that the plan says fits, on the first rank for all. Collective.

    Where nothing limits the memory, or nobody wants a plan, it is "none". Where a plan is wanted
    and there is none, it is "full": slower at most by a third, while a run without it may end for
    lack of memory after hours, at its longest sample.
    """
    section = composed.config.trainer
    if section.plan == "off":
        return RecomputeChoice("none", 'none, as trainer.plan is "off"')
    if machine.device.type != "cuda" and not is_requested(composed.config):
        return RecomputeChoice("none", f"none, as {UNPLANNED}")
    if not subject.is_named(section):
        return _safe(subject, "the config does not name all of what is trained")
    machine.watch.moves(len(MODES) * memory_check.SECONDS)
    device = memory_check.device_of(machine)

    def chosen() -> RecomputeChoice:
        try:
            config = _planned(subject, composed, engine)
            plan = memory_check.planned(config, machine, device, len(MODES))
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            return _safe(subject, first_line(error))
        choice = plan["recompute"]
        return RecomputeChoice(choice["mode"], choice["reason"], plan)

    return machine.ranks.on_first(chosen)


def _safe(subject: Subject, why: str) -> RecomputeChoice:
    if not subject.spec.blocks:
        return RecomputeChoice("none", f"none: the model has no blocks, and no plan ({why})")
    return RecomputeChoice("full", f"full, the safe one, as there is no plan ({why})")


def _planned(subject: Subject, composed: Composed, engine: str) -> Json:
    """Return the config to plan, as far as it is resolved, with "auto" in the mode's place."""
    config = subject.settled(composed.config)
    section = {**config.trainer.model_dump(), "engine": engine}
    subject.describe_to(section)
    return {**config.settings, "trainer": section}


PLANNER = Planner(check_memory, choose_recompute)
