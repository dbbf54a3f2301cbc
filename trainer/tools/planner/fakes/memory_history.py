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
Interval = tuple[int, int]
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
class MemoryHistory:
    """All storages of a run, and its phases."""

    phases: tuple[tuple[str, int], ...]
    """The name and the first tick of each, in order."""
    marks: tuple[int, ...]
    """The ticks, in order, at which parts of a step begin: the first and the last block of a
    forward pass, each change between forward and backward pass, and the update."""
    spans: Ticks
    """The first and the last tick of each storage, its bytes, those that rounding adds, and the
    place of its consumer in `consumers`. Shape (storages, 5)."""
    consumers: tuple[tuple[str, str], ...]
    """Kind, and kind with module or operator."""
    operators: Ticks
    """A number for the operator of each tick, the same in every process."""

    @property
    def end(self) -> int:
        """The tick after the last one."""
        return len(self.operators)

    @cached_property
    def sizes(self) -> Ticks:
        """Bytes in use at each tick."""
        changes = np.zeros(self.end + 2, np.int64)
        size = self.spans[:, 2]
        np.add.at(changes, self.spans[:, 0], size)
        np.subtract.at(changes, self.spans[:, 1] + 1, size)
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

    def ranges(self) -> Iterator[tuple[str, Interval]]:
        """Yield the name and the ticks of each phase."""
        ends = [start for _, start in self.phases[1:]] + [self.end]
        for (name, start), end in zip(self.phases, ends, strict=True):
            yield name, (start, max(end, start + 1))

    def peaks(self) -> list[Peak]:
        """Return each phase's peak, in order; the largest if the phase occurs several times."""
        largest: dict[str, int] = {}
        for name, phase in self.ranges():
            tick = self.fullest(phase)
            if name not in largest or self.sizes[tick] > self.sizes[largest[name]]:
                largest[name] = tick
        return [self.at(tick, name) for name, tick in largest.items()]

    def fullest(self, part: Interval) -> int:
        """Return the tick between two at which most memory is in use."""
        start, end = part
        return start + int(self.sizes[start:end].argmax())

    def parts(self, start: int, end: int) -> list[Interval]:
        """Divide what is between two ticks at the marks there."""
        marks = [mark for mark in self.marks if start < mark < end]
        return list(zip([start, *marks], [*marks, end], strict=True))


def alike(
    few: MemoryHistory, more: MemoryHistory, here: Interval, there: Interval
) -> Iterator[tuple[int, int]]:
    """Yield ticks of a phase at which a run and one with more blocks do the same.

    `here` and `there`: the phase in each. Both run the same operators from the beginning of each of
    its parts, and before its end, for as long as both have blocks. These stretches are cut
    into pieces, and the fullest tick of each is yielded. So are the fullest ticks of the whole
    phase if they are in the same part.
    """
    parts = few.parts(*here), more.parts(*there)
    fullest = few.fullest(here), more.fullest(there)
    marked = len(parts[0]) == len(parts[1]) > 1
    if not marked or _place(parts[0], fullest[0]) == _place(parts[1], fullest[1]):
        yield fullest
    if not marked:
        return
    for one, other in zip(*parts, strict=True):
        length = one[1] - one[0]
        others = abs(other[1] - other[0] - length)  # the operators of the blocks that one lacks
        each = others or length
        mine = few.operators[slice(*one)]
        theirs = more.operators[slice(*other)]
        # beyond its last block a run may do by chance what the other does in a block
        for begin, end in _pieces(_common(mine, theirs) - others, each):
            here = one[0] + begin, one[0] + end
            there = other[0] + begin, other[0] + end
            yield few.fullest(here), more.fullest(there)
        for begin, end in _pieces(_common(mine[::-1], theirs[::-1]) - others, each):
            here = one[1] - end, one[1] - begin
            there = other[1] - end, other[1] - begin
            yield few.fullest(here), more.fullest(there)


def _place(parts: Sequence[Interval], tick: int) -> int:
    """Return the index of the part in which a tick is."""
    return next(index for index, (start, end) in enumerate(parts) if start <= tick < end)


def _pieces(length: int, each: int) -> Iterator[Interval]:
    """Divide a length into pieces; the last one is at most as long as the others."""
    for begin in range(0, length, each):
        yield begin, min(begin + each, length)


def _common(one: Ticks, other: Ticks) -> int:
    """Return how many values are the same from the beginning on."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
