"""Sketches of what comes next: each a recipe of a few lines, which the protocol has room for.

A pair of sequences a sample; a head of its own over the body of a language model; a loss over the
samples of all data ranks; an image beside the tokens.
"""

from __future__ import annotations

from sketches import body, contrast, image, pairs
from trainer.plugins import NAMED

SKETCHES = {
    "pair": pairs.RECIPE,
    "head": body.RECIPE,
    "contrast": contrast.RECIPE,
    "contrast_alone": contrast.ALONE,
    "image": image.RECIPE,
}
for name, recipe in SKETCHES.items():
    NAMED["recipe"][f"sketch:{name}"] = recipe
