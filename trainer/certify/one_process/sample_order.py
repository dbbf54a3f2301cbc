"""The order of samples and the seeds of a run, written a second time from their contracts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from trainer.layout import Layout


def numbers_of(layout: Layout, seed: int, size: int, step: int) -> np.ndarray:
    """Return the numbers of a step's samples, [accumulation, data ranks, micro-batch].

    They are the step's part of the stream of all epochs, each of `size` samples.
    """
    batch = layout.train_batch
    epochs = range(step * batch // size, (step + 1) * batch // size + 1)
    stream = np.concatenate([permutation(seed, epoch, size) for epoch in epochs])
    first = step * batch - epochs.start * size
    shape = (layout.accumulation, layout.data_ranks, layout.micro_batch)
    return stream[first : first + batch].reshape(shape)  # type: ignore[no-any-return]


class DropoutSeeds:
    """The seeds of random numbers in a forward pass: the micro-batch's, and one for each block."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_micro_batch = 0

    def start(self, step: int, data_rank: int, micro_batch: int) -> None:
        """Seed PyTorch for a micro-batch."""
        seed = seed_of("dropout", self._seed, step, data_rank)
        self.begin(seed_of(seed, micro_batch))

    def begin(self, seed: int) -> None:
        """Seed PyTorch with a number, from which the blocks' seeds follow."""
        self._of_micro_batch = seed
        torch.manual_seed(seed)

    def before_block(self, index: int) -> Callable[[nn.Module, object], None]:
        """Return a hook that seeds PyTorch for a block in training."""

        def hook(module: nn.Module, inputs: object) -> None:
            if module.training:
                torch.manual_seed((self._of_micro_batch + index + 1) % 2**63)

        return hook


def permutation(seed: int, epoch: int, size: int) -> list[int]:
    """Return the order of an epoch's samples, by a Feistel network of 12 rounds.

    It permutes side x side numbers; a result that is not below `size` goes through it again.
    """
    side = 2 * -(-(math.isqrt(size - 1) + 1) // 2)
    keys = [seed_of("order", seed, epoch, number) for number in range(12)]

    def once(number: int) -> int:
        left, right = divmod(number, side)
        for key in keys:
            mixed = right ^ key
            for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
                mixed = (mixed ^ mixed >> shift) * factor % 2**64
            left, right = right, (left + (mixed ^ mixed >> 31)) % side
        number = left * side + right
        return number if number < size else once(number)

    return [once(number) for number in range(size)]


def seed_of(*parts: int | str) -> int:
    """Return 63 of the first 64 bits of a SHA-256 over the seed's purpose and its numbers."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") // 2
