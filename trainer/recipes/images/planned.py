"""An image classifier as the planner simulates it: without weights, on images of zeros."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from trainer.config import TrainerSection
from trainer.distributed.ranks import ALONE
from trainer.errors import refused
from trainer.layout import Layout
from trainer.models.classifiers import Images
from trainer.models.finetuning.changed import changed_spec
from trainer.models.flops import counted_flops
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel, SampleCost
from trainer.recipes.images import classifier
from trainer.recipes.images.task import ImageClassification
from trainer.supervise.process import cache_folder
from trainer.tasks.task import Batch


def planned_classifier(section: TrainerSection, layout: Layout) -> PlannedModel:
    """Describe the classifier that a config names. Raises ConfigError."""
    named = classifier.named_in(section)
    known = classifier.expected(section, cache_folder())
    read = ("weights", "weights_backbone")  # none are read or downloaded
    arguments = {key: value for key, value in named.arguments.items() if key not in read}
    shape = (known.channels, *known.size)
    classes = len(known.classes)
    spec = classifier.spec_of(section, known, replace(named, arguments=arguments, folder=None))
    plain = ImageClassification(classes, spec.build, spec.blocks)
    first = [(torch.zeros(shape), 0)] * 2
    classifier.check(spec, plain, known, str(section.data.path or section.task), layout, first)
    spec = changed_spec(spec, section, ALONE).tried_on(plain.trial(first))
    task = plain.regularised(spec, section.label_smoothing, section.neftune_alpha)
    batch = batches_of(known)
    hidden = math.prod(shape)
    with suppress(KeyError):  # a block that takes no tensor
        shapes = [task.hidden_shape(batch(1), block) for block in range(len(spec.blocks))]
        hidden = min([hidden, *map(math.prod, shapes)])
    kind = f"images of {' x '.join(map(str, shape))}, {classes:,} classes"
    sample = SampleCost("images", 1, kind, _flops_of_an_image(spec, task, batch), hidden)
    return PlannedModel(spec, lambda spec: task, batch, sample)


def _flops_of_an_image(
    spec: ModelSpec, task: ImageClassification, batch: Callable[[int], Batch]
) -> float:
    """Count FLOPs on the meta device, of two images: batch norm has no statistics of one."""
    two = {name: part.to("meta") for name, part in batch(2).items()}
    expected = "scores of these images in training, as in an evaluation"
    start = "its training fails on the meta device: "
    # whatever the model's own code raises
    with refused(f"trainer.model: {spec.name}", expected, named=True, start=start):
        return counted_flops(spec, lambda model: task.loss_sum(task.prepare(model), two)) / 2


def batches_of(images: Images) -> Callable[[int], Batch]:
    """Return a function that makes micro-batches as `ImageClassification` collates them."""
    return lambda count: {
        "input": torch.zeros(count, images.channels, *images.size),
        "target": torch.zeros(count, dtype=torch.int64),
        "count": torch.tensor(count),
        "share": torch.tensor(1.0),
    }
