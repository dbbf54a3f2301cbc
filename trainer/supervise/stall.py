"""The diagnosis of a run that hangs: from the beats of its ranks to a sentence and a table."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.supervise.phase import Phase

MOST_LINES = 6
BUSY, IDLE = 0.8, 0.5
"""A rank is slow if it is busy for more than the first share of its time, and most others for less
than the second.
"""


@dataclass(frozen=True)
class Beat:
    """The report of a rank on itself."""

    rank: int
    host: str
    process: int
    phase: Phase
    step: int
    """The step in progress, from 1; 0 before the first."""
    still: float
    """Seconds since it last made progress."""
    number: int = 0
    busy: float | None = None
    """The share of the last minute in which it did not wait for other ranks; None: too early to
    say.
    """
    stack: tuple[str, ...] = ()
    """The stack of its main thread, innermost last; empty until it has stood still for long."""

    @property
    def place(self) -> str:
        return place(self.step, self.phase)

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, list(Phase).index(self.phase)


def place(step: int, phase: Phase) -> str:
    return f"step {step}, {phase}" if step else phase


def behind(beats: Sequence[Beat]) -> list[Beat]:
    """Return the ranks that are behind another one in progress."""
    least = min(beat.progress for beat in beats)
    found = [beat for beat in beats if beat.progress == least]
    return found if len(found) < len(beats) else []


def straggler(beats: Sequence[Beat]) -> Beat | None:
    """Return the rank that all others wait for half of the time, while it hardly waits itself, if
    there is one.
    """
    found = sorted(
        (beat for beat in beats if beat.busy is not None), key=lambda beat: -(beat.busy or 0.0)
    )
    if len(found) < max(2, len(beats)):
        return None
    usual = found[(len(found) + 1) // 2].busy or 0.0
    return found[0] if (found[0].busy or 0.0) > BUSY and usual < IDLE else None


def diagnosis(beats: Sequence[Beat], silent: Callable[[Beat], bool]) -> list[str]:
    """Say in one sentence which rank holds the run up, and why; then list the ranks by phase, and
    that rank's stack.
    """
    quiet, late, apart = [beat for beat in beats if silent(beat)], behind(beats), elsewhere(beats)
    if quiet:
        cause, named = f"in {quiet[0].place}, {who(quiet)} {described(quiet[0])}", quiet
    elif late:
        cause, named = (
            f"{who(late)} {'is' if len(late) == 1 else 'are'} behind, at {late[0].place}",
            late,
        )
    elif apart:
        cause, named = (
            f"{who(apart)} waits elsewhere than the others, at {apart[0].stack[-1]}",
            apart,
        )
    else:
        cause, named = f"all ranks stand at the same place, {beats[0].place}", list(beats[:1])
    still = min(beat.still for beat in beats)
    return [
        f"the run stands still for {still:.0f} s: {cause}",
        *table(beats, silent),
        *_stack(named),
    ]


def table(beats: Sequence[Beat], silent: Callable[[Beat], bool]) -> list[str]:
    groups: dict[tuple[str, bool], list[Beat]] = {}
    for beat in beats:
        groups.setdefault((beat.place, silent(beat)), []).append(beat)
    return [
        (
            f"  {_numbers(group)}: {name}, for {min(beat.still for beat in group):.0f} "
            f"s{', silent' if mute else ''}"
        )
        for (name, mute), group in list(groups.items())[:MOST_LINES]
    ]


def _stack(named: Sequence[Beat]) -> list[str]:
    shown = next((beat for beat in named if beat.stack), None)
    return (
        []
        if shown is None
        else [f"  rank {shown.rank} stands at", *(f"    {frame}" for frame in shown.stack)]
    )


def elsewhere(beats: Sequence[Beat]) -> list[Beat]:
    """Return the ranks whose stacks differ from most others'; empty if there are none, or it is not
    known.
    """
    groups: dict[tuple[str, ...], list[Beat]] = {}
    for beat in beats:
        groups.setdefault(beat.stack, []).append(beat)
    found = min(groups.values(), key=lambda group: (len(group), -group[0].rank))
    return found if len(groups) > 1 and found[0].stack else []


def state_of(process: int) -> str | None:
    """Return Linux's letter for the state of a process; None if it is gone, "?" where it can't be
    seen.
    """
    if not Path("/proc/self/stat").exists():
        return "?"
    with suppress(OSError, IndexError):
        return (
            Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        )
    return None


def is_gone(process: int) -> bool:
    """Return True if a process of this machine has ended."""
    return state_of(process) in (None, "Z", "X")


def described(beat: Beat) -> str:
    if beat.host != socket.gethostname():
        return "gives no sign of life: its machine, its network or its process is gone or stopped"
    known = {
        None: "is gone",
        "Z": "is gone",
        "T": "is stopped (SIGSTOP)",
        "D": "waits for a disk (state D)",
    }
    return known.get(state_of(beat.process), "gives no sign of life, though its process is there")


def who(beats: Sequence[Beat]) -> str:
    first = beats[0]
    more = f" and {len(beats) - 1} more" if len(beats) > 1 else ""
    return f"rank {first.rank} on {first.host} (process {first.process}){more}"


def _numbers(beats: Sequence[Beat]) -> str:
    numbers = [beat.rank for beat in beats]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:8])) + (
        f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    )
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
