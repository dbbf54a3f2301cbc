"""Several sources as one: how much of each an epoch has, and which of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.data.source import Source


class Mixture:
    """An epoch has `counts[i]` samples of source `i`: all of it as often as it goes, then some of a shuffled stream.

    So over the epochs each sample of a source is seen equally often, but for one time. A function of seed, epoch and
    number alone (contract 2).
    """

    def __init__(self, sources: Sequence[Source], counts: Sequence[int], seed: int) -> None:
        self._sources = list(sources)
        self._counts = list(counts)
        self._ends = np.cumsum(self._counts)
        self._seed = seed
        self._shuffled: dict[int, dict[int, np.ndarray]] = {}
        """By source: its order in the rounds of its stream that were last asked for."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        return self.in_epoch(index, 0)

    def in_epoch(self, index: int, epoch: int) -> Any:
        which, number = self.place(index, epoch)
        return {**self._sources[which][number], "source": which}

    def place(self, index: int, epoch: int) -> tuple[int, int]:
        """Which source sample `index` of an epoch is of, and which of its samples it is."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        count, size = self._counts[which], len(self._sources[which])
        within, whole = index - int(self._ends[which]) + count, count // size * size
        if within < whole:
            return which, within % size
        turn, at = divmod(epoch * (count - whole) + within - whole, size)
        return which, int(self._order(which, turn)[at])

    def _order(self, which: int, turn: int) -> np.ndarray:
        known = self._shuffled.setdefault(which, {})
        if turn not in known:
            for old in [other for other in known if abs(other - turn) > 1]:
                del known[old]
            generator = np.random.Generator(np.random.PCG64([self._seed, which, turn, 1]))
            known[turn] = generator.permutation(len(self._sources[which]))
        return known[turn]


def by_epochs(sizes: Sequence[int], epochs: Sequence[float]) -> list[int]:
    """So many passes over each source an epoch; at least a sample."""
    return [max(1, round(size * many)) for size, many in zip(sizes, epochs, strict=True)]


def by_weights(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """As many samples an epoch as all sources have, shared by their weights; at least one of each."""
    total, whole = sum(sizes), sum(weights)
    return [max(1, round(total * weight / whole)) for weight in weights]
