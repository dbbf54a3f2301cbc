"""An image classifier as the planner simulates it: without weights, on images of zeros."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from trainer.config import TrainerSection
from trainer.layout import Layout
from trainer.models.classifiers import Images
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel, SampleCost
from trainer.recipes.images import classifier
from trainer.recipes.images.task import ImageClassification
from trainer.supervise.process import cache_folder
from trainer.tasks.sample_cost import flops_of_sample
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
    spec = spec.tried_on(plain.trial(first))
    task = plain.regularised(spec, section.label_smoothing, section.neftune_alpha)
    batch = batches_of(known)
    hidden = math.prod(shape)
    with suppress(KeyError):  # a block that takes no tensor
        shapes = [task.hidden_shape(batch(1), block) for block in range(len(spec.blocks))]
        hidden = min([hidden, *map(math.prod, shapes)])
    kind = f"images of {' x '.join(map(str, shape))}, {classes:,} classes"

    def cost(spec: ModelSpec) -> SampleCost:
        return SampleCost("images", 1, kind, flops_of_sample(spec, task, batch), hidden)

    return PlannedModel(spec, lambda spec: task, batch, cost)


def batches_of(images: Images) -> Callable[[int], Batch]:
    """Return a function that makes micro-batches as `ImageClassification` collates them."""
    return lambda count: {
        "input": torch.zeros(count, images.channels, *images.size),
        "target": torch.zeros(count, dtype=torch.int64),
        "count": torch.tensor(count),
        "share": torch.tensor(1.0),
    }
