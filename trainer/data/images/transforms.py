"""Image transforms; the random ones depend on seed, epoch and sample alone.

torchvision's transforms (v2) draw from torch's default generator, which the whole process shares.
Here each image has a generator of its own, so that an image looks the same in any worker, thread,
rank and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainer.config import AugmentSection
from trainer.distributed.seeding import derive
from trainer.models import classifiers
from trainer.models.classifiers import Images

Transform = Callable[[torch.Tensor], torch.Tensor]
"""[channels, height, width], uint8 or float from 0 to 1 -> the same in float32, normalised."""
_T = torch.Tensor
DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
DRAWING |= {torch.multinomial, torch.bernoulli}
DRAWING |= {_T.uniform_, _T.normal_, _T.random_, _T.bernoulli_, _T.exponential_, _T.multinomial}


class DrawFrom(TorchFunctionMode):
    """A mode in which this thread's random numbers come from one generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in DRAWING and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Varied:
    """The augmentation of training images."""

    steps: Transform
    normal: Transform
    last: Transform | None
    """The transform after normalisation, if any: erasing, which leaves the mean colour."""

    def __call__(self, image: torch.Tensor, seed: int, epoch: int, index: int) -> torch.Tensor:
        """Transform sample `index` as it looks in the given epoch."""
        drawing = DrawFrom(derive("augment", seed, epoch, index))
        with drawing:
            tensor = self.steps(image)
        tensor = self.normal(tensor)
        if self.last is not None:
            with drawing:
                tensor = self.last(tensor)
        return tensor


def sized(size: Sequence[int] | None) -> list[object]:
    """Return transforms to (height, width): scale the short side, cut off the rest evenly."""
    from torchvision.transforms import v2

    return [] if size is None else [partial(_covering, size), v2.CenterCrop(list(size))]


def _covering(size: Sequence[int], image: torch.Tensor) -> torch.Tensor:
    """Scale an image so that it just covers height and width."""
    from torchvision.transforms.v2.functional import resize

    sides = list(zip(size, image.shape[-2:], strict=True))
    scale = max(wanted / side for wanted, side in sides)
    if scale == 1:
        return image
    scaled = [max(wanted, round(side * scale)) for wanted, side in sides]
    return resize(image, scaled, antialias=True)  # type: ignore[no-any-return]


def for_evaluation(images: Images, size: Sequence[int] | None) -> Transform:
    from torchvision.transforms import v2

    return v2.Compose([*sized(size), Normal(images)])  # type: ignore[no-any-return]


def for_training(
    images: Images, size: Sequence[int] | None, augment: AugmentSection
) -> Varied | None:
    """Return the augmentation, or None if no option asks for any."""
    from torchvision.transforms import v2

    if augment == AugmentSection():
        return None
    first = sized(size)
    if augment.crop_scale is not None:
        first = [v2.RandomResizedCrop(images.size, scale=augment.crop_scale, antialias=True)]
    elif augment.crop_padding:
        first.append(v2.RandomCrop(images.size, padding=augment.crop_padding))
    saturation = augment.colour if images.mode == "RGB" else 0
    colour = v2.ColorJitter(augment.colour, augment.colour, saturation)
    chosen = [
        (augment.flip, v2.RandomHorizontalFlip(augment.flip)),
        (augment.rotate, v2.RandomRotation(augment.rotate, v2.InterpolationMode.BILINEAR)),
        (augment.trivial, v2.TrivialAugmentWide()),
        (augment.colour, colour),
    ]
    last = v2.RandomErasing(augment.erase) if augment.erase else None
    return Varied(v2.Compose([*first, *(one for on, one in chosen if on)]), Normal(images), last)


class Normal:
    """The conversion to float32 and normalisation, by kernels: a third of the transforms' cost."""

    def __init__(self, images: Images) -> None:
        self._mean = list(images.mean)
        self._std = list(images.std)
        self._plain = set(self._mean) == {0.0} and set(self._std) == {1.0}

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        from torchvision.transforms.v2.functional import normalize_image, to_dtype_image

        tensor = to_dtype_image(image, torch.float32, scale=True)
        return tensor if self._plain else normalize_image(tensor, self._mean, self._std)


class OpenedClassifier(NamedTuple):
    model: nn.Module
    transform: Callable[[object], torch.Tensor]
    """Turns Pillow's image into a tensor [channels, height, width]."""
    classes: tuple[str, ...]


def opened(folder: Path) -> OpenedClassifier:
    """Open a run's classifier with the transform of its evaluation. Raises ConfigError."""
    from torchvision.transforms.v2.functional import pil_to_tensor

    model, images = classifiers.opened(folder)
    transform = for_evaluation(images, images.size)
    prepared = lambda image: transform(pil_to_tensor(image.convert(images.mode)))  # noqa: E731
    return OpenedClassifier(model, prepared, images.classes)
