"""The recipe of masked language models, which fill in tokens: the task `masked_lm`."""

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


class MaskedLanguageModel:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.masked_lm.subject import open_masked

        return open_masked(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.masked_lm.planned import planned_masked

        return planned_masked(section, layout)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.masked_lm.certificate import MaskedCase

        return MaskedCase(small, machine, folder)


RECIPE = MaskedLanguageModel()
