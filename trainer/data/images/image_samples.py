"""Images as samples: read, checked, prepared and, in training, augmented."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.config import AugmentSection, DataSection, ImagesSection
from trainer.data.dataset import Pairs, notes_on
from trainer.data.images import image_sets, transforms
from trainer.data.images.image_reading import GREY, read
from trainer.data.images.image_sets import KNOWN, Labelled, Picture
from trainer.data.order import split
from trainer.data.values import digest_of_samples, seeded
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, Problem
from trainer.models.classifiers import Images
from trainer.storage import Json
from trainer.tasks.task import IGNORED

LOOKED_AT = 32
"""The number of images, evenly spaced, whose kind and size are compared before the run."""
MEASURED = 256
"""The number of images, evenly spaced, from which mean and deviation are computed."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Own = tuple[object, object] | None
"""A script's data: to train on, and to be evaluated on, or None."""


@dataclass(frozen=True)
class ImageSource:
    """Samples of a data set: (image [channels, height, width], float32; number of the class)."""

    labelled: Labelled
    indices: Sequence[int]
    images: Images
    fixed: transforms.Transform
    varied: transforms.Varied | None
    seed: int
    options: ImagesSection

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a sample as in evaluation. Raises DataError if it can't be read or used."""
        return self._sample(index, None)

    def in_epoch(self, index: int, epoch: int) -> tuple[torch.Tensor, int]:
        """Return a sample as in training in the given epoch."""
        return self._sample(index, epoch if self.varied is not None else None)

    def _sample(self, index: int, epoch: int | None) -> tuple[torch.Tensor, int]:
        number = self.indices[index]
        try:
            pixels, label = read(self.labelled, number, self.options.mode, self.images.mode)
        except DataError as error:
            if self.options.corrupt == "error":
                raise
            print(f"skipped: {error}", file=sys.stderr, flush=True)
            return torch.zeros(self.images.channels, *self.images.size), IGNORED
        if self.options.size is None and tuple(pixels.shape[1:]) != self.images.size:
            raise _other_size(self.labelled.name(number), pixels, self.images.size)
        if not 0 <= label < len(self.images.classes):
            expected = f"a number from 0 to {len(self.images.classes) - 1}"
            raise DataError(Problem(self.labelled.name(number), f"label {label}", expected))
        if epoch is None or self.varied is None:
            return self.fixed(pixels), label
        return self.varied(pixels, self.seed, epoch, index), label


@dataclass(frozen=True)
class ImageData(Pairs):
    """The images that a run trains on and is evaluated on."""

    train: ImageSource
    path: str

    @property
    def images(self) -> Images:
        return self.train.images

    def describe(self) -> str:
        images = self.images
        kind = "grey" if images.mode == "L" else "colour"
        count = f"{len(self.train):,} {kind} images of {images.size[0]} x {images.size[1]}"
        held_out = f", {len(self.evaluation):,} held out" if self.evaluation else ""
        return f"{self.path}: {count}, {len(images.classes)} classes{held_out}"

    def lines(self) -> list[str]:
        """Describe the preparation of images for the user, a line each."""
        options = self.train.options
        images = self.images
        mean = " ".join(f"{value:.3f}" for value in images.mean)
        std = " ".join(f"{value:.3f}" for value in images.std)
        varied = ", ".join(f"{key} {value}" for key, value in _changes(options.augment).items())
        normalised = f"normalised by mean {mean}, std {std}"
        lines = [f"{normalised}; training images are augmented by {varied or 'nothing'}"]
        if options.corrupt == "skip":
            lines.append("images that can't be read are skipped, and named in logs/")
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def description(self) -> Json:
        images = self.images
        numbers = {name: list(getattr(images, name)) for name in ("size", "mean", "std")}
        return {
            "samples": len(self.train),
            "classes": list(images.classes),
            "images": {"mode": images.mode, **numbers},
            "augment": _changes(self.train.options.augment),
        }


def _changes(augment: AugmentSection) -> Json:
    plain = AugmentSection().model_dump()
    return {key: value for key, value in augment.model_dump().items() if value != plain[key]}


def open_images(
    data: DataSection, images: ImagesSection, seed: int, cache: Path, ranks: Ranks, own: Own = None
) -> ImageData:
    """Open the config's data, or a script's `own`. Collective.

    Raises the same DataError on every rank.
    """

    # on each rank: data sets hold open files, and can't be sent
    whole, evaluation = ranks.on_own(lambda: _opened(data, images, cache, own))
    image_sets.check_labels(whole)
    if evaluation is not None:
        image_sets.check_labels(evaluation)
        if evaluation.classes != whole.classes:
            actual = f"{len(evaluation.classes)} classes: {', '.join(evaluation.classes[:5])}"
            expected = f"those of the training data: {', '.join(whole.classes[:5])}"
            raise DataError(Problem("trainer.data.evaluation_path", actual, expected))
    training, evaluated = _parts(whole, evaluation, data.evaluation_fraction)

    varies = own is not None and ranks.on_first(lambda: _varies(whole, training))

    def looked_at() -> tuple[Images, str]:
        with seeded():  # own images may be drawn at random
            return look()

    def look() -> tuple[Images, str]:
        resolved = _look(whole, training, images)
        if evaluated is not None:
            _look(*evaluated, images)
        return resolved, _fingerprint(whole, training, not varies)

    kind, fingerprint = ranks.on_first(looked_at)
    _same_everywhere(_fingerprint(whole, range(min(2, whole.count)), not varies), ranks)
    size = None if images.size is None else kind.size
    fixed = transforms.for_evaluation(kind, size)
    varied = transforms.for_training(kind, size, images.augment)
    train = ImageSource(whole, training, kind, fixed, varied, seed, images)
    held_out = (
        None if evaluated is None else ImageSource(*evaluated, kind, fixed, None, seed, images)
    )
    name = "data" if own else str(data.path)
    notes = notes_on(varies, set())
    return ImageData(train, held_out, fingerprint, name, notes=notes)


def _opened(
    data: DataSection, images: ImagesSection, cache: Path, own: Own
) -> tuple[Labelled, Labelled | None]:
    """Open the images to train on, and those of an evaluation with a data set of its own."""
    if own is not None:
        train, evaluation = own
        held_out = None if evaluation is None else image_sets.handed_in(evaluation, images.classes)
        return image_sets.handed_in(train, images.classes), held_out
    if data.path is None:
        raise DataError(Problem("trainer.data.path", "nothing", KNOWN))
    train = image_sets.open_set(data.path, data, images, cache, train=True)
    path = data.evaluation_path
    assert not isinstance(path, dict)
    if path is None and data.path in list(image_sets.TORCHVISION):
        path = data.path
    if path is None:
        return train, None
    return train, image_sets.open_set(path, data, images, cache, train=False)


def _parts(
    train: Labelled, own: Labelled | None, fraction: float
) -> tuple[Sequence[int], tuple[Labelled, Sequence[int]] | None]:
    """Return the training indices, and the evaluation's data set with its indices."""
    if own is not None:
        return range(train.count), (own, range(own.count))
    if not fraction or train.count < 2:
        return range(train.count), None
    training, held_out = split(train.count, fraction)
    return training, (train, held_out)


def _spaced(indices: Sequence[int], most: int) -> list[int]:
    places = np.linspace(0, len(indices) - 1, min(most, len(indices))).astype(int)
    return [indices[place] for place in places]


def _look(samples: Labelled, indices: Sequence[int], options: ImagesSection) -> Images:
    """Determine mode, size and normalisation from some images. Raises DataError if they differ."""
    numbers = [number for number, _ in _readable(samples, indices, LOOKED_AT, options, "RGB")]
    if not numbers:
        actual = f"none of {LOOKED_AT} images can be read"
        raise DataError(Problem("trainer.data", actual, "images"))
    mode = _mode(samples, numbers, options)
    readable = {number: read(samples, number, options.mode, mode)[0] for number in numbers}
    first = tuple(readable[numbers[0]].shape[1:])
    for number, pixels in readable.items():
        if options.size is None and tuple(pixels.shape[1:]) != first:
            raise _other_size(samples.name(number), pixels, first)
    size = options.size or list(first)
    height, width = (size, size) if isinstance(size, int) else size
    plain = Images(samples.classes, mode, (height, width), (0.0,), (1.0,))
    mean, std = _normalisation(samples, indices, options, plain)
    return Images(samples.classes, mode, (height, width), mean, std)


def _mode(samples: Labelled, readable: Sequence[int], options: ImagesSection) -> str:
    if options.mode != "auto":
        return options.mode
    kinds = [_kind(samples.load(number)[0]) for number in readable]
    return "L" if set(kinds) <= set(GREY) else "RGB"


def _readable(
    samples: Labelled, indices: Sequence[int], most: int, options: ImagesSection, mode: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield some images, evenly spaced. Raises DataError for a bad one, unless it is skipped."""
    for number in _spaced(indices, most):
        try:
            pixels, _ = read(samples, number, options.mode, mode)
        except DataError:
            if options.corrupt == "error":
                raise
        else:
            yield number, pixels


def _kind(image: Picture) -> str:
    if torch.is_tensor(image):
        return "L" if image.shape[0] == 1 else "RGB"
    return str(image.mode)


def _normalisation(
    samples: Labelled, indices: Sequence[int], options: ImagesSection, plain: Images
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of each channel."""
    from torchvision.transforms.v2.functional import to_dtype

    channels = plain.channels
    if options.mean is not None and options.std is not None:
        if len(options.mean) != channels or len(options.std) != channels:
            actual = f"{len(options.mean)} and {len(options.std)} numbers"
            expected = f"{channels}: one for each channel"
            raise DataError(Problem("trainer.images.mean, std", actual, expected))
        return tuple(options.mean), tuple(options.std)
    if options.normalize == "none":
        return (0.0,) * channels, (1.0,) * channels
    if options.normalize == "imagenet":
        mean, std = IMAGENET
        return (mean, std) if channels == 3 else ((sum(mean) / 3,), (sum(std) / 3,))
    total = torch.zeros(channels).double()
    squares = torch.zeros(channels).double()
    count = 0
    for _, pixels in _readable(samples, indices, MEASURED, options, plain.mode):
        values = to_dtype(pixels, torch.float64, scale=True).flatten(1)
        total += values.sum(1)
        squares += (values**2).sum(1)
        count += values.shape[1]
    centre = total / count
    spread = (squares / count - centre**2).clamp_min(1e-6).sqrt()
    return tuple(round(v, 4) for v in centre.tolist()), tuple(round(v, 4) for v in spread.tolist())


def _other_size(name: str, pixels: torch.Tensor, size: tuple[int, ...]) -> DataError:
    actual = f"{pixels.shape[1]} x {pixels.shape[2]}, where others are {size[0]} x {size[1]}"
    hint = "Set trainer.images.size, to which all are brought"
    return DataError(Problem(name, actual, "images of one size", hint))


def _fingerprint(samples: Labelled, indices: Sequence[int], pixels: bool) -> str:
    """Hash classes, labels and some images: it shows that data changed, though not every change.

    Without `pixels` images do not count: they differ from reading to reading.
    """
    digest = hashlib.sha256(json.dumps([samples.count, len(indices), samples.classes]).encode())
    digest.update(np.asarray(samples.labels or (), np.int64).tobytes())
    for number in _spaced(indices, 16) if pixels else ():
        digest.update(_pixels(samples, number))
    return digest.hexdigest()


def _pixels(samples: Labelled, number: int) -> bytes:
    try:
        return read(samples, number, "RGB", "RGB")[0].numpy().tobytes()
    except DataError:
        return b"unreadable"


def _varies(samples: Labelled, indices: Sequence[int]) -> bool:
    """Return True for a user's data set that changes its images at random."""
    looked_at = _spaced(indices, 16)
    return digest_of_samples(lambda number: _pixels(samples, number), looked_at, set()) is None


def _same_everywhere(fingerprint: str, ranks: Ranks) -> None:
    if others := ranks.differing(fingerprint):
        actual = f"other images on rank {', '.join(map(str, others))} than on rank 0"
        raise DataError(Problem("trainer.data", actual, "the same files on every machine"))
