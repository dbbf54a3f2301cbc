"""Made-up sequences: the label of a token is a function of it and of its neighbour."""

from __future__ import annotations

import torch

from labelling.model import WORDS
from trainer.tasks.task import IGNORED


class Labelled:
    """A data set of pairs: tokens [length] and labels [length], IGNORED for padding."""

    def __init__(self, count: int, length: int, labels: int) -> None:
        self._count = count
        self._length = length
        self._labels = labels

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, WORDS, (self._length,), generator=generator)
        labels = (tokens + tokens.roll(1)) % self._labels
        padded = index % (self._length // 2)
        labels[self._length - padded :] = IGNORED
        return tokens, labels
