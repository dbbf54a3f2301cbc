"""The subject of an image classifier: its model, its task and its images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trainer.config import TrainerSection
from trainer.data.images.image_samples import ImageData, open_images
from trainer.engines import Machine
from trainer.errors import ConfigError, Problem
from trainer.models.classifiers import Classifier
from trainer.recipe import RunContext, Subject
from trainer.recipes.images import classifier
from trainer.recipes.images.task import ImageClassification
from trainer.storage import Json
from trainer.supervise.process import cache_folder, cores

MOST_WORKERS = 8


@dataclass(frozen=True)
class ImageSubject(Subject):
    """A classifier of labelled images."""

    task: ImageClassification
    data: ImageData

    unit: ClassVar[str] = "img"
    units: ClassVar[str] = "images"

    def workers(self, section: TrainerSection, machine: Machine) -> int:
        """On a GPU as many as there are cores for; on the CPU those are busy."""
        if section.images.workers is not None:
            return section.images.workers
        if machine.device.type == "cpu":
            return 0
        sharers = machine.local_world_size or machine.ranks.world_size
        return max(1, min(MOST_WORKERS, cores() // sharers - 1))

    def lines(self, workers: int) -> Iterator[str]:
        whose = f"{workers} workers on each rank" if workers else "a thread on each rank"
        yield from (f"images  {line}" for line in (*self.data.lines(), f"loaded by {whose}"))

    def loading_advice(self, workers: int) -> str:
        return f"; raise trainer.images.workers (now {workers})"

    def describe_to(self, planned: Json) -> None:
        images = self.data.images
        size = list(images.size)
        classes = len(images.classes)
        planned["images"] |= {"size": size, "mode": images.mode, "classes": classes}
        planned["data"]["path"] = None


def open_classifier(context: RunContext) -> ImageSubject:
    """Open a classifier, by name or handed in, on images that the config names or a script hands
    in. Collective; raises ConfigError or DataError."""
    section = context.section
    handed_in = context.handed_in
    ranks = context.ranks
    if handed_in.loss is not None:
        actual = 'a loss, with the task "image_classification"'
        expected = "none: it is the cross entropy"
        raise ConfigError(Problem("loss", actual, expected, "Leave trainer.task out."))
    own = None
    if handed_in.data is not None:
        own = (handed_in.data, handed_in.evaluation_data)
    name = section.model.name_or_path
    path = section.data.path
    for key, handed, named in (
        ("trainer.model.name_or_path", handed_in.model, name),
        ("trainer.data.path", own, path),
    ):
        if handed is not None and named is not None:
            raise ConfigError(Problem(key, str(named), "nothing: it is handed in"))
    of_config: Classifier | None = None
    if handed_in.model is None:
        of_config = pretrained = ranks.on_own(lambda: classifier.named_in(section))

        def download() -> None:
            pretrained.state()

        ranks.await_first(download)  # once
    data = open_images(section.data, section.images, section.seed, cache_folder(), ranks, own)
    spec = classifier.spec_of(section, data.images, of_config, handed_in.model, handed_in.blocks)
    task = ImageClassification(len(data.images.classes), spec.build, spec.blocks)
    first = context.first_samples(data.train)
    checked = (spec, task, data.images, data.path, context.layout, first)
    ranks.on_first(lambda: classifier.check(*checked))
    task = task.measuring(handed_in.metrics, first)
    return ImageSubject(spec.tried_on(task.trial(first)), task, data)
