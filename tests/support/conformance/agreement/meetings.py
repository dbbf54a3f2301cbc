"""The ranks that have to be at a message together: a group, or the two ends of a direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.layout import AXES, Layout
from trainer.tools.planner.fakes.messages import POINT_TO_POINT, Message

SYMMETRIC = ("replicate", "shard")
"""Axes along which groups issue the same; stages and tensor ranks may issue other messages."""


@dataclass(frozen=True)
class Meeting:
    """A group, or a direction between two ranks; data ranks count as one among representatives."""

    key: tuple[object, ...]
    name: str = field(compare=False)
    """The name in messages to the user."""
    along: tuple[str, ...] = field(compare=False)
    """The mesh axes along which the members differ."""
    members: tuple[int, ...] = field(compare=False)
    """The traced ranks that have to take part."""

    @property
    def is_pair(self) -> bool:
        return self.key[0] == "pair"


class Meetings:
    """The meetings of these ranks of a layout: all of its ranks, or representatives."""

    def __init__(self, ranks: Sequence[int], layout: Layout) -> None:
        self._layout = layout
        self._at = [layout.coordinates(rank) for rank in range(layout.world_size)]
        self._ranks = tuple(sorted(ranks))
        self._complete = len(self._ranks) == layout.world_size
        self._known: dict[tuple[object, ...], Meeting] = {}
        self._made: dict[Meeting, Meeting] = {}

    def of(self, rank: int, message: Message) -> Meeting:
        """Return the meeting in which `rank` issues `message`."""
        ends: tuple[int, ...] = ()
        if message.name in POINT_TO_POINT:
            assert message.peer is not None
            ends = (rank, message.peer) if message.name == "send" else (message.peer, rank)
        known = ends, () if ends else message.group
        if known not in self._known:
            make = self._exact if self._complete else self._like
            made = make(tuple(sorted(set(ends or message.group))), ends)
            self._known[known] = self._made.setdefault(made, made)
        return self._known[known]

    def _exact(self, group: tuple[int, ...], ends: tuple[int, ...]) -> Meeting:
        along = self._layout.axes_of(group)
        if ends:
            return Meeting(
                ("pair", *ends),
                f"from rank {ends[0]} to rank {ends[1]}",
                along,
                tuple(sorted(ends)),
            )
        return Meeting(("group", *group), f"among {ranks_named(group)}", along, group)

    def _like(self, group: tuple[int, ...], ends: tuple[int, ...]) -> Meeting:
        """Return the meeting of all ranks that differ from this group in their data rank alone."""
        along = self._layout.axes_of(group)
        fixed = {
            axis: self._coordinate(group[0], axis)
            for axis in AXES
            if axis not in along and axis not in SYMMETRIC
        }
        outside = "".join(
            f", {axis} {at}" for axis, at in fixed.items() if getattr(self._layout, axis) > 1
        )
        if ends:
            return self._pair_like(ends, along)
        within = frozenset(self._projected(rank, along) for rank in group)
        members = tuple(
            rank
            for rank in self._ranks
            if self._projected(rank, along) in within
            and all(self._coordinate(rank, axis) == at for axis, at in fixed.items())
        )
        name = (
            f"among {len(group):,} ranks along {' x '.join(along)}{outside}, as "
            f"{ranks_named(group)}"
        )
        return Meeting(("group", along, within, *fixed.items()), name, along, members)

    def _pair_like(self, ends: tuple[int, ...], along: tuple[str, ...]) -> Meeting:
        kept = tuple(axis for axis in AXES if axis not in SYMMETRIC)
        sides = tuple(self._projected(rank, kept) for rank in ends)
        steps = tuple(
            (self._coordinate(ends[1], axis) - self._coordinate(ends[0], axis))
            % getattr(self._layout, axis)
            for axis in SYMMETRIC
        )
        members = tuple(rank for rank in self._ranks if self._projected(rank, kept) in sides)
        name = f"from ranks like {ends[0]} to ranks like {ends[1]}"
        return Meeting(("pair", *sides, steps), name, along, members)

    def _coordinate(self, rank: int, axis: str) -> int:
        return self._at[rank][axis]

    def _projected(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self._coordinate(rank, axis) for axis in axes)


def ranks_named(ranks: Sequence[int], most: int = 6) -> str:
    """Name ranks: `rank 3`, `ranks 0, 1` or `ranks 0, 1, ... and 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= most:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[: most - 2]))}, ... and {ranks[-1]}"


def described(message: Message) -> str:
    """Describe a message: its kind, size and dtype, and where in the code it is issued."""
    kind = str(message.dtype).removeprefix("torch.") if message.dtype is not None else "nothing"
    to = {"send": " to", "receive": " from"}.get(message.name)
    peer = f"{to} rank {message.peer}" if to else ""
    return (
        f"{message.name}{peer} of {message.size:,} bytes of {kind} "
        f"({message.place or 'outside of this package'})"
    )


def said(message: Message) -> tuple[object, ...]:
    """Return the part of a message that has to be equal on all members."""
    return (
        "message" if message.name in POINT_TO_POINT else message.name,
        message.dtype,
        message.size,
    )
