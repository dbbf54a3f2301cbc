"""Sketches of what comes next: each a recipe of a few lines, which the protocol has room for.

A pair of sequences a sample; a column of the samples, computed before training by the same layout;
a head of its own over the body of a language model; a loss over the samples of all data ranks; an
image beside the tokens.
"""

from __future__ import annotations

from sketches import body, column, contrast, image, pairs
from trainer.plugins import register

SKETCHES = {
    "pair": pairs.RECIPE,
    "column": column.RECIPE,
    "head": body.RECIPE,
    "contrast": contrast.RECIPE,
    "contrast_alone": contrast.ALONE,
    "image": image.RECIPE,
}
for name, recipe in SKETCHES.items():
    register("recipe", f"sketch:{name}")(recipe)
