"""The messages of all ranks, run against each other: which rank waits forever, and for whom.

Each rank goes through its messages in the order in which it issues them, and passes none before all
members have arrived at it: no collective overlaps another, and no send is buffered. Sends and
receives of one batch are under way together. Ranks that finish under these conditions also finish
where messages may overtake one another, be buffered or overlap: that only removes conditions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from tests.support.conformance.agreement.meetings import (
    Meeting,
    Meetings,
    described,
    ranks_named,
    said,
)
from trainer.errors import Problem, listed
from trainer.tools.planner.fakes.messages import Message
from trainer.tools.planner.simulate import Trace

MEND = (
    "Ranks that are in two groups have to come to both in one order, and to a send as to its "
    "receive."
)


class _Rank:
    """The progress of a rank: the messages at which it waits, by meeting, in order."""

    def __init__(self, trace: Trace) -> None:
        self.number = trace.rank
        self._trace = trace
        self._steps = _together(trace.messages)
        self.waits: dict[Meeting, list[Message]] = {}

    def go_on(self, meetings: Meetings) -> Iterable[Meeting]:
        """Continue with the next message or batch; return the meetings at which it now waits."""
        for message in next(self._steps, ()):
            self.waits.setdefault(meetings.of(self.number, message), []).append(message)
        return list(self.waits)


def standing_still(traces: Sequence[Trace], meetings: Meetings) -> list[Problem]:
    """List the ranks that never reach their end: at which message, and who is missing there."""
    ranks = {trace.rank: _Rank(trace) for trace in traces}
    waiting: dict[Meeting, set[int]] = defaultdict(set)
    ready: list[Meeting] = []

    def arrive(rank: _Rank) -> None:
        for meeting in rank.go_on(meetings):
            waiting[meeting].add(rank.number)
            ready.append(meeting)

    for rank in ranks.values():
        arrive(rank)
    while ready:
        meeting = ready.pop()
        at = waiting[meeting]
        if len(at) < len(meeting.members) or not _alike([ranks[number] for number in at], meeting):
            continue
        for number in sorted(at):
            rank = ranks[number]
            rank.waits[meeting].pop(0)
            if rank.waits[meeting]:
                ready.append(meeting)
                continue
            del rank.waits[meeting]
            at.remove(number)
            if not rank.waits:
                arrive(rank)
    return [_problem(rank, ranks) for rank in ranks.values() if rank.waits]


def _together(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    """Yield message by message, and those of a batch together."""
    numbered = (
        (at, getattr(message, "batch", None), message) for at, message in enumerate(messages)
    )
    for _, batch in groupby(numbered, lambda row: -1 - row[0] if row[1] is None else row[1]):
        yield tuple(message for *_, message in batch)


def _alike(ranks: Sequence[_Rank], meeting: Meeting) -> bool:
    """Whether all wait for the same here: a collective of other sizes or of another phase is
    another.
    """
    heads = [rank.waits[meeting][0] for rank in ranks]
    return len({(said(message), message.phase) for message in heads}) <= 1


def _problem(rank: _Rank, ranks: dict[int, _Rank]) -> Problem:
    meeting, messages = next(iter(rank.waits.items()))
    mine = messages[0]
    missing = []
    for number in meeting.members:
        other = ranks[number]
        there = other.waits.get(meeting, [None])[0]
        if there is None or (said(there), there.phase) != (said(mine), mine.phase):
            missing.append(_whereabouts(other))
    return Problem(
        f"rank {rank.number}, {mine.phase}, {mine.place}",
        f"hangs at {described(mine)} {meeting.name}",
        f"there too: {listed(missing, 3)}",
        MEND,
    )


def _whereabouts(rank: _Rank) -> str:
    waits = [messages[0] for messages in rank.waits.values()]
    if not waits:
        return f"{ranks_named([rank.number])}, which is at its end"
    return f"{ranks_named([rank.number])}, which is in {waits[0].phase} at {described(waits[0])}"
