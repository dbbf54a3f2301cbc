"""The spec of an image classifier, its expected images, and its checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import TrainerSection
from trainer.data.images.image_samples import open_images
from trainer.data.images.image_sets import SHAPES
from trainer.distributed.ranks import ALONE
from trainer.errors import ConfigError, DataError, Problem
from trainer.layout import Layout
from trainer.models import classifiers
from trainer.models.classifiers import Classifier, Images
from trainer.models.own import module
from trainer.models.spec import ModelSpec
from trainer.recipes.images.task import ImageClassification
from trainer.tasks.task import Sample

MOST_CLASSES = 10_000_000
"""The most classes for images that have not been read."""


def expected(section: TrainerSection, cache: Path) -> Images:
    """Determine a classifier's input, as far as it is known before a run, without a download.

    From images on this machine, from a data set's name, else from the config. Raises ConfigError if
    neither gives their size or the number of classes, DataError for images that can't be read.
    """
    path = section.data.path
    options = section.images
    paths = [path] if isinstance(path, str) else path or []
    name = paths[0] if paths else ""
    is_here = Path(name).expanduser().exists() or glob(os.path.expanduser(name), recursive=True)
    if name and name not in SHAPES and section.data.format != "hub" and is_here:
        training = section.data.model_copy(update={"evaluation_path": None})
        return open_images(training, options, section.seed, cache, ALONE).images
    configured = options.classes or arguments_of(section).get("num_classes")
    known: Any = SHAPES.get(name, (configured, "RGB", None))
    count = known[0]
    mode = known[1]
    size = options.size or known[2]
    if size is None or type(count) is not int or not 1 <= count <= MOST_CLASSES:
        actual = f"not set, and images of {path} can't be looked at here"
        hint = "Set both, such as trainer.images.size=224 trainer.images.classes=1000"
        expected = f"numbers, and at most {MOST_CLASSES:,} classes"
        place = "trainer.images.size, trainer.images.classes"
        raise ConfigError(Problem(place, actual, expected, hint))
    height, width = (size, size) if isinstance(size, int) else size
    mode = mode if options.mode == "auto" else options.mode
    plain = Images(tuple(map(str, range(count))), mode, (height, width), (), ())
    return replace(plain, mean=(0.0,) * plain.channels, std=(1.0,) * plain.channels)


def named_in(section: TrainerSection) -> Classifier:
    """Return the classifier that the config names. Raises ConfigError for none that is known."""
    if (name := section.model.name_or_path) is None:
        raise ConfigError(Problem("trainer.model.name_or_path", "nothing", classifiers.NAMES))
    return classifiers.named(name, arguments_of(section), section.model.weights)


def arguments_of(section: TrainerSection) -> dict[str, object]:
    """Return the config's arguments for the callable that builds the classifier."""
    return section.model.config if isinstance(section.model.config, dict) else {}


def spec_of(
    section: TrainerSection,
    images: Images,
    classifier: Classifier | None,
    model: Callable[[], nn.Module] | None = None,
    blocks: str | None = None,
) -> ModelSpec:
    """Build the spec of the config's classifier for such images; or of a given `model`."""
    pattern = blocks or section.model.blocks
    if classifier is None:
        assert model is not None
        spec = module.spec_of(model, pattern, section.seed)
        classifier = Classifier(str(spec.config["module"]))
    else:
        classifier = classifier.completed(images)
        spec = classifiers.spec_of(classifier, pattern, section.seed)
        if (trained_on := classifier.normalised_by) not in (None, (images.mean, images.std)):
            start = f"{section.model.weights} was trained on images of another mean and std"
            note = f'{start}: {trained_on} (trainer.images.normalize="imagenet")'
            spec = replace(spec, notes=(*spec.notes, note))

    def save(folder: Path, dtype: torch.dtype | None) -> None:
        text = classifiers.describe(classifier, images)
        (Path(folder) / classifiers.DESCRIPTION).write_text(text)

    files = replace(spec.files, save_config=save, opens="meshloom.open_classifier")
    return replace(spec, files=files)


def check(
    spec: ModelSpec,
    task: ImageClassification,
    images: Images,
    path: str,
    layout: Layout,
    first: list[Sample],
) -> None:
    """Raise for an unsupported layout, and for images or classes that the model can't take."""
    model = spec.build()
    if layout.tensor > 1:
        split = "how the layers of an image classifier are split over ranks"
        actual = f"{layout.tensor}, and nothing says {split}"
        hint = "Use ZeRO-3, FSDP or pipeline.stages for a model that is too large."
        raise ConfigError(Problem(f"tensor_parallel.autotp_size: {spec.name}", actual, "1", hint))
    convolution = next((inner for inner in model.modules() if isinstance(inner, nn.Conv2d)), None)
    if convolution is not None and convolution.in_channels != images.channels:
        actual = "colour images, with 3 channels"
        other = "L"
        if images.mode == "L":
            actual = "grey images, with 1 channel"
            other = "RGB"
        channels = f"{convolution.in_channels} channels"
        expected = f"{channels}, which the first convolution of {spec.name} takes"
        hint = f'Set trainer.images.mode="{other}"'
        raise DataError(Problem(f"trainer.data: {path}", actual, expected, hint))
    task.check_output(first, spec.name)
