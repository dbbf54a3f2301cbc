"""Whether all ranks say what the others wait for: proven from what each says, before it hangs
anyone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from tests.conformance.agreement.interleaving import standing_still
from tests.conformance.agreement.meetings import Meeting, Meetings, described, ranks_named, said
from trainer.errors import Problem
from trainer.layout import Layout
from trainer.tools.planner.messages import Message
from trainer.tools.planner.simulate import Trace

GROUP_MEND = (
    "All ranks of a group have to issue the same collectives in one order: look for a branch or a "
    "loop there that not "
    "all of them take alike."
)
PAIR_MEND = "Each send has to meet a receive of its size and dtype, in order."

WINDOW = 400
"""Messages that are looked through at once for the first that differs: what it takes grows with
their square.
"""

Lines = dict[int, list[Message]]
"""Rank -> what it says in one meeting and phase, in order."""


def disagreements(traces: Sequence[Trace], layout: Layout) -> list[Problem]:
    """What would hang these ranks, or mix up what they send; empty: it is proven that nothing does.

    Of all ranks of a layout, what is proven is this, of what the traces hold (the building, the
    steps and the evaluation that were taken):

    - in each phase, all members of a group issue the same collectives, in the same order, with the same dtypes and
      sizes; groups of the same members count as one;
    - in each phase, and for each pair of ranks and direction, what is sent is received: as many messages, in the same
      order, with the same dtypes and sizes;
    - over all groups and pairs together no rank waits for good, even if no send is buffered and no message overlaps
      with another but those of its batch (`tests/conformance/agreement/interleaving.py`).

    Of representatives (fewer ranks than `layout` has), groups that differ in where they stand along
    `replicate` and `shard` alone count as one, and so do pairs; a rank is held to those that are,
    by their coordinates, in such a group. It is proven for the layout where each of its ranks says
    what one of the representatives says, to the same places relative to it. A group of which one
    representative is traced is compared with nothing, and a send to a stage that has no
    representative counts as received.

    Not in a trace, and so not proven: the making of groups, barriers and objects that are gathered
    as pickles; that values which decide about a branch, such as a norm, are equal on all ranks: a
    pretended rank is told that they are; where a reduction's operator or a broadcast's source
    differ; what a kernel sends by itself. A pretended DeepSpeed pipeline leaves out the messages in
    which a stage tells the next what shape comes.
    """
    meetings = Meetings([trace.rank for trace in traces], layout)
    rows = _by_meeting(traces, meetings)
    usual = _usual(rows)
    found = [
        problem
        for (meeting, phase), lines in rows.items()
        for problem in _compared(
            meeting, phase, lines, usual[meeting.is_pair, meeting.along, phase]
        )
    ]
    return [*found, *standing_still(traces, meetings)]


def _by_meeting(traces: Sequence[Trace], meetings: Meetings) -> dict[tuple[Meeting, str], Lines]:
    """What each member says in each meeting and phase; nothing, where it does not come."""
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
    """How often each row is said in meetings along the same axes: of two ranks that differ, one may
    be the odd one.
    """
    found: dict[tuple[bool, tuple[str, ...], str], Counter[object]] = defaultdict(Counter)
    for (meeting, phase), lines in rows.items():
        found[meeting.is_pair, meeting.along, phase].update(
            _row(messages) for messages in lines.values()
        )
    return found


def _row(messages: Sequence[Message]) -> tuple[object, ...]:
    return tuple(said(message) for message in messages)


def _compared(
    meeting: Meeting, phase: str, lines: Lines, usual: Counter[object]
) -> Iterator[Problem]:
    """A problem for those who say the same other thing than most do."""
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
        seen = f"{described(here[0])} before {described(here[1])}, {meeting.name}"
        expected = f"{there[0].place} before {there[1].place}, {as_others}"
    elif here and there:
        seen, expected = (
            f"{described(here[0])} {meeting.name}",
            f"{described(there[0])}, {as_others}",
        )
    elif here:
        seen, expected = f"one more {described(here[0])}", counts
    else:
        seen, expected = f"leaves out {described(there[0])}", counts
    place = (here or there)[0].place
    return Problem(
        f"{ranks_named(odd)}, {phase}, {place}",
        seen,
        expected,
        PAIR_MEND if meeting.is_pair else GROUP_MEND,
    )


def _difference(
    mine: Sequence[Message], theirs: Sequence[Message], *, placed: bool
) -> tuple[Sequence[Message], Sequence[Message]]:
    """The first messages that one side alone has, of each; of two that were swapped, both.

    `placed`: by where they are issued, too: in a row of like messages that tells which is left out.
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
