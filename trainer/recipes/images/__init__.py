"""The recipe of image classifiers: the task `image_classification`."""

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


class ImageClassifier:
    def subject(self, context: RunContext) -> Subject:
        from trainer.recipes.images.subject import open_classifier

        return open_classifier(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        from trainer.recipes.images.planned import planned_classifier

        return planned_classifier(section, layout)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        from trainer.recipes.images.certificate import image_case

        return image_case(small, handed_in, machine)


RECIPE = ImageClassifier()
