"""The recipe of models with a head for labels or rewards: the task `labels`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import TrainerSection
from trainer.engines import Machine
from trainer.layout import Layout
from trainer.recipe import HandedIn, PlannedModel, RunContext, Subject

if TYPE_CHECKING:
    from trainer.certify.case import Case
    from trainer.certify.tiny_run import Tiny


class Labels:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.labels.subject import open_labels

        return open_labels(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.labels.planned import planned_labels

        return planned_labels(section)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.labels.certificate import labels_case

        return labels_case(small, machine, folder)


RECIPE = Labels()
