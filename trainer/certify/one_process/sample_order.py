"""The order of samples and the seeds of a run, written again from their contracts."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from trainer.layout import Layout


def numbers_of(layout: Layout, seed: int, size: int, step: int) -> np.ndarray:
    """Return the numbers of a step's samples, [accumulation, data ranks, micro-batch].

    They are the next part of the stream of all epochs, each of `size` samples.
    """
    batch = layout.train_batch
    epochs = range(step * batch // size, (step + 1) * batch // size + 1)
    stream = np.concatenate([permutation(seed, epoch, size) for epoch in epochs])
    first = step * batch - epochs.start * size
    shape = (layout.accumulation, layout.data_ranks, layout.micro_batch)
    return stream[first : first + batch].reshape(shape)  # type: ignore[no-any-return]


def permutation(seed: int, epoch: int, size: int) -> list[int]:
    """Return the order of an epoch's samples, one after another: a Feistel network of 12 rounds
    over side x side numbers, through which what is not below `size` goes again."""
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
    """Return the first 63 bits of a SHA-256 over the seed's purpose."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") // 2
