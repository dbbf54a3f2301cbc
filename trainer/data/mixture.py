"""Several sources as one: the number of samples that an epoch has of each, and which ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trainer.config.sections.model_and_data import SourceSection
from trainer.data.order import SampleOrder, Shuffle
from trainer.tasks.task import Sample


class Mixture:
    """A source in which an epoch has `counts[i]` samples of source `i`.

    These are whole passes over the source, then a part of a shuffled stream, so that over the
    epochs the counts of any two samples of a source differ by one at most. A function of order,
    epoch and number alone.
    """

    def __init__(
        self, sources: Sequence[Source], counts: Sequence[int], order: SampleOrder
    ) -> None:
        self._sources = list(sources)
        self._counts = list(counts)
        self._ends = np.cumsum(self._counts)
        self._shuffles = [Shuffle(len(one), order, i) for i, one in enumerate(sources)]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> object:
        return self.in_epoch(index, 0)

    def in_epoch(self, index: int, epoch: int) -> object:
        which, number = self.place(index, epoch)
        return {**self._sources[which][number], "source": which}

    def place(self, index: int, epoch: int) -> tuple[int, int]:
        """Return the source that sample `index` of an epoch is from, and its number there."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        count = self._counts[which]
        size = len(self._sources[which])
        within = index - int(self._ends[which]) + count
        whole = count // size * size
        if within < whole:
            return which, within % size
        position = epoch * (count - whole) + within - whole
        return which, int(self._shuffles[which].ids(np.array([position]))[0])


def samples_an_epoch(sources: Sequence[SourceSection], sizes: Sequence[int]) -> list[int]:
    """Return each source's samples in an epoch, at least one: its share of all, or its passes."""
    weights = [source.weight for source in sources if source.weight is not None]
    parts = [sum(sizes) * weight / sum(weights) for weight in weights]
    passes = [size * (one.epochs or 1) for size, one in zip(sizes, sources, strict=True)]
    return [max(1, round(count)) for count in parts or passes]


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def sample_of(source: Source, index: int, epoch: int | None) -> Sample:
    """Return a sample as in an epoch, by a source's `in_epoch`; with None, as in evaluation."""
    in_epoch = None if epoch is None else getattr(source, "in_epoch", None)
    return source[index] if in_epoch is None else in_epoch(index, epoch)
