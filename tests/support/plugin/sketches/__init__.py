"""Sketches of what comes next: each a recipe of a few lines, which the protocol has room for.

A pair of sequences a sample; a column of the samples that a frozen reference computed before
training; a head of its own over the body of a language model; a loss over the samples of all data
ranks; an image beside the tokens.
"""

from __future__ import annotations

from sketches import body, column, contrast, image, pairs
from trainer.plugins import register

for name, module in {
    "pair": pairs,
    "column": column,
    "head": body,
    "contrast": contrast,
    "image": image,
}.items():
    register("recipe", f"sketch:{name}")(module.RECIPE)
