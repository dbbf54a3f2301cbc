"""The recipe of preference optimisation on pairs of answers: the task `pairs`."""

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


class PreferencePairs:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.pairs.subject import open_pairs

        return open_pairs(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.pairs.planned import planned_pairs

        return planned_pairs(section)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.pairs.certificate import PreferenceCase

        return PreferenceCase(small, machine, folder)


RECIPE = PreferencePairs()
