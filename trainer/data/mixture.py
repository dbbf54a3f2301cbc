"""Several sources as one: the number of samples that an epoch has of each, and which ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.data.order import Shuffle
from trainer.data.source import Source


class Mixture:
    """A source in which an epoch has `counts[i]` samples of source `i`.

    These are whole passes over the source, then a part of a shuffled stream, so that over the
    epochs the counts of any two samples of a source differ by one at most. A function of seed,
    epoch and number alone; `order`: the version of its shuffles.
    """

    def __init__(
        self, sources: Sequence[Source], counts: Sequence[int], seed: int, order: int
    ) -> None:
        self._sources = list(sources)
        self._counts = list(counts)
        self._ends = np.cumsum(self._counts)
        self._shuffles = [Shuffle(len(one), order, seed, i) for i, one in enumerate(sources)]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        return self.in_epoch(index, 0)

    def in_epoch(self, index: int, epoch: int) -> Any:
        which, number = self.place(index, epoch)
        return {**self._sources[which][number], "source": which}

    def place(self, index: int, epoch: int) -> tuple[int, int]:
        """Return the source that sample `index` of an epoch is from, and its number there."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        count, size = self._counts[which], len(self._sources[which])
        within, whole = index - int(self._ends[which]) + count, count // size * size
        if within < whole:
            return which, within % size
        position = epoch * (count - whole) + within - whole
        return which, int(self._shuffles[which].ids(np.array([position]))[0])


def by_epochs(sizes: Sequence[int], epochs: Sequence[float]) -> list[int]:
    """Return the samples of each source in an epoch, given the passes over it; at least one."""
    return [max(1, round(size * many)) for size, many in zip(sizes, epochs, strict=True)]


def by_weights(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Split as many samples as all sources have by weights; at least one of each."""
    total, whole = sum(sizes), sum(weights)
    return [max(1, round(total * weight / whole)) for weight in weights]
