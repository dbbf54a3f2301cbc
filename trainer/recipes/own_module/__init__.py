"""The recipe of your own module: pairs of input and target, and a loss that is handed in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import TrainerSection
from trainer.engines import Machine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.recipe import HandedIn, PlannedModel, RunContext, Subject

if TYPE_CHECKING:
    from trainer.certify.case import Case
    from trainer.certify.tiny_run import Tiny


class OwnModule:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.own_module.subject import open_module

        return open_module(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        raise ConfigError(Problem("trainer.task", section.task, "a task whose model is named"))

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.own_module.certificate import module_case

        return module_case(small, handed_in, machine)


RECIPE = OwnModule()
