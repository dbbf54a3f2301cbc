"""One image as a tensor, from a file or from a script's own data."""

from __future__ import annotations

import torch

from trainer.data.images.image_sets import Labelled
from trainer.errors import DataError, Problem, refused

GREY = ("1", "L", "LA")


def read(samples: Labelled, number: int, wanted: str, mode: str) -> tuple[torch.Tensor, int]:
    """Read image `number` as uint8 [channels, height, width], with its label. Raises DataError.

    A tensor of floats from 0 to 1 stays one. `mode` is the mode of the result; `wanted` is the
    config's: under "auto", a colour image among grey ones is an error.
    """
    from torchvision.transforms.v2.functional import pil_to_tensor

    start = "can't be read: "
    hint = 'Remove it, or set trainer.images.corrupt="skip"'
    # whatever decoders raise
    with refused(
        samples.name(number), "an image", named=True, start=start, hint=hint, raises=DataError
    ):
        image, label = samples.load(number)
        if torch.is_tensor(image):
            return _of_tensor(image, mode), int(label)
        kind = image.mode
        pixels = pil_to_tensor(image.convert(mode))
    if kind.startswith(("I", "F")):
        actual = f"an image with values of more than 8 bits (Pillow's mode {kind})"
        raise DataError(
            Problem(samples.name(number), actual, "8 bits a channel", "Convert it first")
        )
    if wanted == "auto" and mode == "L" and kind not in GREY:
        actual = f"a colour image (Pillow's mode {kind}) among grey ones"
        hint = "Set trainer.images.mode"
        raise DataError(Problem(samples.name(number), actual, "images of one kind", hint))
    return pixels, int(label)


def _of_tensor(image: torch.Tensor, mode: str) -> torch.Tensor:
    """Convert a tensor of a user's data set: uint8, or float from 0 to 1; one channel or three."""
    from torchvision.transforms.v2.functional import grayscale_to_rgb, rgb_to_grayscale

    image = image[None] if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        expected = "[channels, height, width] with 1 or 3 channels"
        raise ValueError(f"a tensor of shape {list(image.shape)} is no {expected}")
    if image.is_floating_point() and not (float(image.min()) >= 0 and float(image.max()) <= 1):
        raise ValueError("a tensor with values outside of 0 to 1")
    if not image.is_floating_point() and image.dtype != torch.uint8:
        raise ValueError(f"a tensor of {image.dtype} is neither uint8 nor a float from 0 to 1")
    pixels = image.float() if image.is_floating_point() else image
    if (mode == "L") == (pixels.shape[0] == 1):
        return pixels
    return rgb_to_grayscale(pixels) if mode == "L" else grayscale_to_rgb(pixels)
