"""An image beside the tokens: its patches come before them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, unfold

from sketches.sketch import WORDS, Block, Made, Sketch, tokens_of
from trainer.data.mixture import Source
from trainer.models.spec import ModelSpec
from trainer.tasks.supervised import Supervised

PATCHES = 4


class Inputs(nn.Module):
    """The hidden states of an image's patches, then of the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Linear(16, width)
        self.table = nn.Embedding(WORDS, width)

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.patches(unfold(pixels, kernel_size=4, stride=4).transpose(1, 2))
        return torch.cat([patches, self.table(tokens)], 1)


class Tokens(nn.Module):
    """The hidden states behind those of the patches."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, PATCHES:]


class Captioner(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inputs = Inputs(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.tokens = Tokens()
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, sequence, words] of tokens [batch, sequence] after an image's
        patches; pixels [batch, 1, 8, 8]."""
        hidden = self.inputs(tokens, pixels)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.tokens(hidden))  # type: ignore[no-any-return]


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
