"""The recipe of text embeddings, by contrast over a whole step: the task `embeddings`."""

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


class Embeddings:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.embeddings.subject import open_embeddings

        return open_embeddings(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.embeddings.planned import planned_embeddings

        return planned_embeddings(section, layout)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.embeddings.certificate import EmbeddingsCase

        return EmbeddingsCase(small, machine, folder)


RECIPE = Embeddings()
