"""The sections of images: how they are read, and how training images are changed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trainer.config.keys.key import Key
from trainer.config.sections.section import Count, Number, Section, Share, Whole


def _range(value: list[float]) -> list[float]:
    if len(value) != 2 or not 0 < value[0] <= value[1] <= 1:
        raise ValueError("two numbers above 0 and at most 1, the lower one first")
    return value


def _pair(value: list[int]) -> list[int]:
    if len(value) != 2:
        raise ValueError("a height and a width")
    return value


class AugmentSection(Section):
    """The augmentation of training images in this order, new in each epoch; by default none."""

    crop_padding: Annotated[Whole, Field(ge=0, le=4096), Key(unit="pixels")] = 0
    """Pixels of black border, from which a part of the image's own size is cut out at random."""
    crop_scale: Annotated[
        Annotated[list[Number], AfterValidator(_range)] | None, Key(unit="share")
    ] = None
    """The smallest and largest share of the image's area that is cut out and scaled to `size`:
    [0.08, 1]."""
    flip: Annotated[Share, Key(unit="share")] = 0.0
    """The probability of exchanging left and right."""
    rotate: Annotated[Number, Field(ge=0, le=180), Key(unit="degrees")] = 0.0
    """The largest rotation in degrees, to either side."""
    trivial: bool = False
    """One random operation of a random strength (TrivialAugment, arXiv 2103.10158)."""
    colour: Annotated[Share, Key(unit="factor")] = 0.0
    """The largest relative change of brightness, contrast and saturation."""
    erase: Annotated[Share, Key(unit="share")] = 0.0
    """The probability of blanking a random rectangle."""


class ImagesSection(Section):
    """The reading and preparation of images for the task `image_classification`."""

    root: str | None = None
    """The folder of torchvision's data sets and their downloads; None: in the cache folder."""
    image_column: str = "image"
    label_column: str = "label"
    classes: Annotated[Count | None, Key(unit="classes")] = None
    """The number of classes, if the data does not give it, or a plan can't read the images."""
    size: Annotated[
        Annotated[list[Count], AfterValidator(_pair)] | Count | None, Key(unit="pixels")
    ] = None
    """The images' size for the model, a number or [height, width]; None: as they are, all alike."""
    mode: Literal["auto", "RGB", "L"] = "auto"
    """Colour or grey; auto: as the images are."""
    normalize: Annotated[Literal["data", "imagenet", "none"], Key(needs="no mean and std")] = "data"
    """The source of the mean and deviation of each channel: the training images, or ImageNet."""
    mean: Annotated[list[Number] | None, Key(unit="share")] = None
    """The mean of each channel, of values from 0 to 1; with `std`, in place of `normalize`."""
    std: Annotated[list[Annotated[Number, Field(gt=0)]] | None, Key(unit="share")] = None
    augment: AugmentSection = AugmentSection()
    workers: Annotated[Annotated[Whole, Field(ge=0, le=1024)] | None, Key(unit="processes")] = None
    """Processes of a rank that load images; 0: a thread; None: by the cores, on a GPU up to 8."""
    corrupt: Literal["error", "skip"] = "error"
    """The handling of an image that can't be read; a skipped one counts for nothing."""
