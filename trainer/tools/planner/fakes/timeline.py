"""A rank's memory over time: what lives at each tick of a ledger.

Runs with more blocks do the same at the ends of each part of a step: in the first blocks, in the
last ones, at the loss, in the update. Such moments of two runs are compared, and not the fullest of
each, which may be different ones: with few blocks a step may be fullest at the loss, with many when
all gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ticks = NDArray[np.int64]
Part = tuple[int, int]
"""The first tick, and the one after the last."""


@dataclass(frozen=True)
class Peak:
    """The moment of a phase, or of the whole run, with the most memory in use."""

    phase: str
    size: int
    """Bytes."""
    by_kind: dict[str, int]
    by_consumer: dict[str, int]
    """Bytes by kind and module, blocks counted together; outside modules by what was made."""
    rounding: int
    """Bytes that an allocator's rounding adds."""

    @property
    def largest(self) -> list[tuple[str, int]]:
        """The three consumers with the most bytes."""
        return sorted(self.by_consumer.items(), key=lambda item: -item[1])[:3]


@dataclass(frozen=True)
class Timeline:
    """All storages of a run, and its phases."""

    phases: tuple[tuple[str, int], ...]
    """The name and the first tick of each, in order."""
    marks: tuple[int, ...]
    """The ticks, in order, at which parts of a step begin (`Ledger.mark`)."""
    spans: Ticks
    """The first and the last tick of each storage, its bytes, those that rounding adds, and the
    place of its consumer in `consumers`. Shape (storages, 5)."""
    consumers: tuple[tuple[str, str], ...]
    """Kind, and kind with module or operator."""
    end: int
    """The tick after the last one."""

    @cached_property
    def sizes(self) -> Ticks:
        """Bytes in use at each tick."""
        changes = np.zeros(self.end + 2, np.int64)
        born, died, size = self.spans[:, 0], self.spans[:, 1], self.spans[:, 2]
        np.add.at(changes, born, size)
        np.subtract.at(changes, died + 1, size)
        return np.cumsum(changes)[: self.end]

    def at(self, tick: int, phase: str) -> Peak:
        """Return what lives at a tick, of the phase `phase`."""
        live = self.spans[(self.spans[:, 0] <= tick) & (self.spans[:, 1] >= tick)]
        kinds: dict[str, int] = {}
        consumers: dict[str, int] = {}
        sums = np.zeros(len(self.consumers), np.int64)
        np.add.at(sums, live[:, 4], live[:, 2])
        for place in dict.fromkeys(live[:, 4].tolist()):
            kind, consumer = self.consumers[place]
            kinds[kind] = kinds.get(kind, 0) + int(sums[place])
            consumers[consumer] = int(sums[place])
        return Peak(phase, sum(kinds.values()), kinds, consumers, int(live[:, 3].sum()))

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, first tick and the tick after the last one of each phase."""
        ends = [start for _, start in self.phases[1:]] + [self.end]
        for (name, start), end in zip(self.phases, ends, strict=True):
            yield name, start, max(end, start + 1)

    def peaks(self) -> list[Peak]:
        """Return each phase's peak, in order; the largest if the phase occurs several times."""
        largest: dict[str, int] = {}
        for name, start, end in self.ranges():
            tick = self.fullest((start, end))
            if name not in largest or self.sizes[tick] > self.sizes[largest[name]]:
                largest[name] = tick
        return [self.at(tick, name) for name, tick in largest.items()]

    def fullest(self, part: Part) -> int:
        """Return the tick between two at which most memory is in use."""
        start, end = part
        return start + int(self.sizes[start:end].argmax())

    def parts(self, start: int, end: int) -> list[Part]:
        """Divide what is between two ticks at the marks there."""
        marks = [mark for mark in self.marks if start < mark < end]
        return list(zip([start, *marks], [*marks, end], strict=True))


def alike(few: Sequence[Part], more: Sequence[Part], blocks: int) -> Iterator[tuple[Part, Part]]:
    """Yield the pieces of a phase in which a run and one with more blocks do the same.

    `few` and `more`: the parts of the phase in both; `blocks`: how many more. Each part begins and
    ends alike: pieces as long as a block are counted from both ends, up to the middle of the
    shorter one. Nothing is yielded if the parts are not the same.
    """
    if len(few) != len(more) or len(few) == 1:
        return
    for one, other in zip(few, more, strict=True):
        length = one[1] - one[0]
        each = (other[1] - other[0] - length) // blocks
        if each <= 0:
            yield one, other
            continue
        half = (length + 1) // 2
        begins = range(0, max(1, half - each + 1), each)
        for begin, end in zip(begins, [*begins[1:], half], strict=True):
            yield (one[0] + begin, one[0] + end), (other[0] + begin, other[0] + end)
            yield (one[1] - end, one[1] - begin), (other[1] - end, other[1] - begin)
