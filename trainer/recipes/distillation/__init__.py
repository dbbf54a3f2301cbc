"""The recipe of distillation from a teacher whose likeliest tokens are known: `distillation`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import Config, TrainerSection
from trainer.engines import Machine
from trainer.layout import Layout
from trainer.recipe import HandedIn, PlannedModel, RunContext, Subject

if TYPE_CHECKING:
    from trainer.certify.case import Case
    from trainer.certify.tiny_run import Tiny


class Distillation:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.distillation.subject import open_student

        return open_student(context)

    def precursor(self, config: Config, folder: Path | None) -> Config | None:
        from trainer.recipes.distillation.teacher import teacher_of

        return teacher_of(config, folder)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.distillation.planned import planned_student

        return planned_student(section)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.distillation.certificate import DistillationCase

        return DistillationCase(small, machine, folder)


RECIPE = Distillation()
