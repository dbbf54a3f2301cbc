"""The samples of each step: a pure function of seed and position.

The stream of sample ids is the permutation of epoch 0, then that of epoch 1, and so on; a run's
position in it is one number, the samples seen. World size, micro-batch size and layout only decide
which rank takes which part.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


def sample_ids(seed: int, position: int, count: int, size: int) -> np.ndarray:
    """Return the stream's ids from `position` on, over `size` samples: int64 [count]."""
    parts = []
    while count > 0:
        epoch, offset = divmod(position, size)
        part = _permutation(seed, epoch, size)[offset : offset + count]
        parts.append(part)
        position += len(part)
        count -= len(part)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def micro_batches(
    ids: np.ndarray, micro_batch: int, accumulation: int, data_ranks: int, data_rank: int
) -> list[np.ndarray]:
    """Return this data rank's part of one step's ids: `accumulation` arrays [micro_batch].

    `ids` is [accumulation * data_ranks * micro_batch]; raises ValueError for any other length.
    """
    return list(ids.reshape(accumulation, data_ranks, micro_batch)[:, data_rank])


def held_out(index: int, fraction: float) -> bool:
    """Return True if document `index` is held out: `fraction` of all, evenly spaced.

    The second document always is, so that of two one is held out; no seed affects the choice.
    """
    return math.floor((index - 1) * fraction) > math.floor((index - 2) * fraction)


def split(size: int, fraction: float) -> tuple[list[int], list[int]]:
    """Return the indices of samples to train on, and of those held out."""
    held = [index for index in range(size) if held_out(index, fraction)]
    chosen = set(held)
    return [index for index in range(size) if index not in chosen], held


@lru_cache(maxsize=2)  # a step can contain the end of an epoch
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)
    order.setflags(write=False)
    return order
