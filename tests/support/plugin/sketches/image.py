"""An image beside the tokens: its patches come before them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sketches.sketch import WORDS, Block, Made, Sketch, tokens_of
from trainer.data.mixture import Source
from trainer.models.spec import ModelSpec
from trainer.tasks.supervised import Supervised


class Captioner(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=4, stride=4)
        self.table = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, sequence, words] of tokens [batch, sequence] after an image's
        patches; pixels [batch, 1, 8, 8]."""
        seen = self.patches(pixels).flatten(2).transpose(1, 2)
        hidden = torch.cat([seen, self.table(tokens)], 1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden[:, -tokens.shape[1] :])  # type: ignore[no-any-return]


def samples(count: int) -> Source:
    def captioned(index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randn(1, 8, 8, generator=generator)
        tokens = tokens_of(index)
        return {"tokens": tokens[:-1], "pixels": pixels}, tokens[1:]

    return Made(count, captioned)


def loss(logits: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, int]:
    total = cross_entropy(logits.float().flatten(0, 1), words.flatten(), reduction="sum")
    return total, words.numel()


def task(spec: ModelSpec) -> Supervised:
    return Supervised(loss, spec.build, spec.blocks)


class ImageSketch(Sketch):
    build = Captioner
    samples = samples
    task = task


RECIPE = ImageSketch()
