"""The recipe of causal language models on documents: the task `causal_lm`, the default."""

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


class CausalLanguageModel:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.causal_lm.subject import open_language_model

        return open_language_model(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.causal_lm.planned import planned_language_model

        return planned_language_model(section)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.causal_lm.certificate import LanguageCase

        return LanguageCase(small, machine, folder)


RECIPE = CausalLanguageModel()
