"""The samples of each step: a pure function of seed and position.

The stream of sample ids is the permutation of epoch 0, then that of epoch 1, and so on; a run's
position in it is one number, the samples seen. World size, micro-batch size and layout only decide
which rank takes which part.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trainer.distributed.seeding import derive

LISTED = 1
KEYED = 2
"""The versions of the order, which a checkpoint names: permutations in memory, in runs begun
before it did; and permutations by a key, in all others."""
ROUNDS = 12


class SampleOrder(NamedTuple):
    """The order of a run's samples: a function of these and of their number."""

    seed: int = 0
    version: int = KEYED
    """The version by which the permutations are made."""


OF_SEED_0 = SampleOrder()


class Shuffle:
    """A stream of permutations of `size` numbers, one after another, in an order.

    `source`: the source's number in a mixture.
    """

    def __init__(self, size: int, order: SampleOrder, source: int | None = None) -> None:
        seed = order.seed
        make = {LISTED: _listed, KEYED: _keyed}[order.version]

        def permutation(turn: int) -> Callable[[np.ndarray], np.ndarray]:
            return make([seed, turn] if source is None else [seed, source, turn, 1], size)

        self._size = size
        self._permutation = lru_cache(2)(permutation)  # a step can contain the end of one

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers at these positions of the stream: int64, as many."""
        turns, places = np.divmod(positions, self._size)
        ids = np.empty_like(places)
        for turn in np.unique(turns).tolist():
            ids[turns == turn] = self._permutation(turn)(places[turns == turn])
        return ids

    def samples(self, positions: np.ndarray) -> list[tuple[int, int]]:
        """Return the numbers at these positions, int64 [samples], each with its permutation's."""
        turns = positions // self._size
        return list(zip(self.ids(positions).tolist(), turns.tolist(), strict=True))


def sample_ids(seed: int, position: int, count: int, size: int, order: int) -> np.ndarray:
    """Return the stream's ids from `position` on, over `size` samples: int64 [count]."""
    return Shuffle(size, SampleOrder(seed, order)).ids(np.arange(position, position + count))


def micro_batches(
    ids: np.ndarray, micro_batch: int, accumulation: int, data_ranks: int, data_rank: int
) -> list[np.ndarray]:
    """Return this data rank's part of some steps' ids: `accumulation` of all, [micro_batch] each.

    `ids` is [accumulation * data_ranks * micro_batch]; raises ValueError for any other length.
    """
    return list(ids.reshape(accumulation, data_ranks, micro_batch)[:, data_rank])


def held_out(index: int, fraction: float) -> bool:
    """Return True if document `index` is held out: `fraction` of all, evenly spaced.

    The second document always is, so that of two one is held out; no seed affects the choice.
    """
    return math.floor((index - 1) * fraction) > math.floor((index - 2) * fraction)


class Numbered(Sequence[int]):
    """Some of the numbers below `size`, in order, computed where they are asked for.

    `below(n)`: how many of them are less than n.
    """

    def __init__(self, size: int, below: Callable[[int], int]) -> None:
        self._size = size
        self._below = below

    def __len__(self) -> int:
        return self._below(self._size)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bisect_right(range(self._size), index, key=lambda number: self._below(number + 1))


def split(size: int, fraction: float) -> tuple[Sequence[int], Sequence[int]]:
    """Return the indices of samples to train on, and of those held out, by `held_out`."""

    def left(end: int) -> int:
        return math.floor((end - 2) * fraction) - math.floor(-2 * fraction)

    return Numbered(size, lambda end: end - left(end)), Numbered(size, left)


def _listed(key: list[int], size: int) -> Callable[[np.ndarray], np.ndarray]:
    return np.random.Generator(np.random.PCG64(key)).permutation(size).__getitem__


def _keyed(key: list[int], size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Make a permutation that is computed place by place, and holds nothing.

    A Feistel network over side x side >= size numbers, whose halves are added modulo `side`; what
    it leads out of the range goes through it again (Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002, sections 4 and 5).
    """
    side = 2 * math.ceil((math.isqrt(size - 1) + 1) / 2)  # an odd one has even permutations alone
    keys = [np.uint64(derive("order", *key, number)) for number in range(ROUNDS)]

    def cipher(numbers: np.ndarray) -> np.ndarray:
        left, right = np.divmod(numbers, np.uint64(side))
        for one in keys:
            left, right = right, (left + _mixed(right ^ one) % np.uint64(side)) % np.uint64(side)
        return left * np.uint64(side) + right

    def at(places: np.ndarray) -> np.ndarray:
        permuted = cipher(places.astype(np.uint64))
        while (outside := permuted >= size).any():
            permuted[outside] = cipher(permuted[outside])
        return permuted.astype(np.int64)

    return at


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values: the last steps of SplitMix64 (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014)."""
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))
