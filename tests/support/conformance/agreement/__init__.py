"""Proof from the messages of all ranks that each issues what the others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from tests.support.conformance.agreement.interleaving import standing_still
from tests.support.conformance.agreement.meetings import (
    Meeting,
    Meetings,
    described,
    ranks_named,
    said,
)
from trainer.errors import Problem
from trainer.layout import Layout
from trainer.tools.planner.fakes.messages import Message
from trainer.tools.planner.simulate import Trace

GROUP_MEND = (
    "All ranks of a group have to issue the same collectives in one order: look for a branch or a "
    "loop there that not all of them take alike."
)
PAIR_MEND = "Each send has to meet a receive of its size and dtype, in order."

WINDOW = 400
"""The number of messages compared at once: the cost grows with its square."""

Lines = dict[int, list[Message]]
"""Rank -> its messages in one meeting and phase, in order."""


def disagreements(traces: Sequence[Trace], layout: Layout) -> list[Problem]:
    """List what would hang these ranks or mix up their messages; empty is a proof of neither.

    If `traces` holds all ranks of the layout, this is proven of the messages in them (of building,
    of the steps and the evaluation that were taken):

    - in each phase, all members of a group issue the same collectives in the same order, with the
      same dtypes and sizes; groups of the same members count as one;
    - in each phase, for each pair of ranks and direction, every send has its receive, in the same
      order, with the same dtype and size;
    - over all groups and pairs together no rank waits forever, even if no send is buffered and no
      message overlaps with another but those of its batch
      (`tests/support/conformance/agreement/interleaving.py`).

    If `traces` holds representatives (fewer ranks than the layout has), groups that differ only in
    their place along `replicate` and `shard` count as one, and so do pairs; a rank has to agree
    with the representatives that have a place in such a group. The proof holds for a layout whose
    other ranks issue what one of the representatives issues, to the same places relative to it. A
    group with one representative is compared with nothing, and a send to a stage without a
    representative counts as received.

    Not proven, as it is in no trace: the making of groups, barriers and objects gathered as
    pickles; that values which decide about a branch, such as a norm, are equal on all ranks (a
    pretended rank gets equal ones); a reduction's operator or a broadcast's source; what a kernel
    sends by itself. A pretended DeepSpeed pipeline leaves out the messages by which a stage
    announces shapes to the next.
    """
    meetings = Meetings([trace.rank for trace in traces], layout)
    rows = _by_meeting(traces, meetings)
    usual = _usual(rows)
    results = [
        problem
        for (meeting, phase), lines in rows.items()
        for problem in _compared(
            meeting, phase, lines, usual[meeting.is_pair, meeting.along, phase]
        )
    ]
    return [*results, *standing_still(traces, meetings)]


def _by_meeting(traces: Sequence[Trace], meetings: Meetings) -> dict[tuple[Meeting, str], Lines]:
    """Collect the messages of each member by meeting and phase; none if it does not take part."""
    rows: dict[tuple[Meeting, str], Lines] = {}
    for trace in traces:
        for message in trace.messages:
            meeting = meetings.of(trace.rank, message)
            lines = rows.setdefault((meeting, message.phase), {})
            lines.setdefault(trace.rank, []).append(message)
    for (meeting, _), lines in rows.items():
        for rank in meeting.members:
            lines.setdefault(rank, [])
    return rows


def _usual(
    rows: dict[tuple[Meeting, str], Lines],
) -> dict[tuple[bool, tuple[str, ...], str], Counter[object]]:
    """Count each row of messages over meetings along the same axes, to find the odd one of two."""
    result: dict[tuple[bool, tuple[str, ...], str], Counter[object]] = defaultdict(Counter)
    for (meeting, phase), lines in rows.items():
        result[meeting.is_pair, meeting.along, phase].update(
            _row(messages) for messages in lines.values()
        )
    return result


def _row(messages: Sequence[Message]) -> tuple[object, ...]:
    return tuple(said(message) for message in messages)


def _compared(
    meeting: Meeting, phase: str, lines: Lines, usual: Counter[object]
) -> Iterator[Problem]:
    """Yield a problem for each set of ranks that differs from the most common row."""
    ranks: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(lines):
        ranks.setdefault(_row(lines[rank]), []).append(rank)
    if len(ranks) == 1:
        return
    most = max(ranks, key=lambda row: (len(ranks[row]), usual[row], len(row)))
    for row, odd in ranks.items():
        if row != most:
            yield _problem(meeting, phase, lines, odd, ranks[most])


def _problem(
    meeting: Meeting, phase: str, lines: Lines, odd: list[int], others: list[int]
) -> Problem:
    mine, theirs = lines[odd[0]], lines[others[0]]
    here, there = _difference(mine, theirs, placed=not meeting.is_pair)
    as_others = f"as {ranks_named(others)} {'does' if len(others) == 1 else 'do'}"
    number = f"{len(theirs)} message{'' if len(theirs) == 1 else 's'}"
    counts = f"{number} {meeting.name} in {phase}, {as_others}, not {len(mine)}"
    if len(here) > 1 and [said(m) for m in here[:2]] == [said(m) for m in reversed(there[:2])]:
        actual = f"{described(here[0])} before {described(here[1])}, {meeting.name}"
        expected = f"{there[0].place} before {there[1].place}, {as_others}"
    elif here and there:
        actual, expected = (
            f"{described(here[0])} {meeting.name}",
            f"{described(there[0])}, {as_others}",
        )
    elif here:
        actual, expected = f"one more {described(here[0])}", counts
    else:
        actual, expected = f"leaves out {described(there[0])}", counts
    place = (here or there)[0].place
    return Problem(
        f"{ranks_named(odd)}, {phase}, {place}",
        actual,
        expected,
        PAIR_MEND if meeting.is_pair else GROUP_MEND,
    )


def _difference(
    mine: Sequence[Message], theirs: Sequence[Message], *, placed: bool
) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the first messages of each side that the other lacks; both of two that are swapped.

    `placed`: compare also where they are issued, which tells like messages apart.
    """
    ours, other = ([(said(m), m.place if placed else "") for m in side] for side in (mine, theirs))
    start = next(
        (at for at, (one, two) in enumerate(zip(ours, other, strict=False)) if one != two),
        len(ours),
    )
    start = min(start, len(other))
    for at in range(start, max(len(ours), len(other)), WINDOW):
        window = slice(at, at + WINDOW)
        matcher = SequenceMatcher(None, ours[window], other[window], autojunk=False)
        for kind, i, i_end, j, j_end in matcher.get_opcodes():
            here, there = mine[at + i : at + i_end], theirs[at + j : at + j_end]
            if kind == "equal" or _row(here) == _row(there):
                continue
            two = slice(at + i, at + i + 2), slice(at + j, at + j + 2)
            if len(ours[two[0]]) == 2 and ours[two[0]] == other[two[1]][::-1]:
                return mine[two[0]], theirs[two[1]]
            while here and there and said(here[0]) == said(there[0]):
                here, there = here[1:], there[1:]
            return here[:1], there[:1]
    raise AssertionError("the same rows")
