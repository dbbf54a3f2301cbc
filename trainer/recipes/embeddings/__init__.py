"""The recipe of text embeddings, by contrast over a whole step: the task `embeddings`."""

from __future__ import annotations

from trainer.config import TrainerSection
from trainer.layout import Layout
from trainer.recipe import PlannedModel, RunContext, Subject


class Embeddings:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.embeddings.subject import open_embeddings

        return open_embeddings(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.embeddings.planned import planned_embeddings

        return planned_embeddings(section, layout)


RECIPE = Embeddings()
