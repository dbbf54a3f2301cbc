"""The diagnosis of a run that hangs: from the beats of its ranks to a sentence and a table."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import psutil


class Phase(StrEnum):
    """A phase, in the order of a run and of a step; its text is what files and tables have."""

    PREPARING = "preparing"
    BUILDING = "building"
    WAITING = "waiting for data"
    TRAINING = "training"
    PROFILING = "profiling"
    """The time that the profiler takes besides the recorded phases: to begin, and to write."""
    LOGGING = "logging"
    EVALUATING = "evaluating"
    SAVING = "saving"
    FINISHING = "finishing"
    LEAVING = "leaving"

    @property
    def patience(self) -> float:
        """The multiple of a step's patience that it may take."""
        return _LONG.get(self, 1.0)


_LONG = {
    **dict.fromkeys((Phase.PREPARING, Phase.BUILDING, Phase.FINISHING), 15.0),
    **dict.fromkeys((Phase.EVALUATING, Phase.SAVING, Phase.LEAVING), 5.0),
}


MOST_LINES = 6
BUSY, IDLE = 0.8, 0.5
"""The shares of its time for which a slow rank is busy at least, and most others at most."""


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
    """The share of the last minute in which it did not wait for others; None if not known yet."""
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
    late = [beat for beat in beats if beat.progress == least]
    return late if len(late) < len(beats) else []


def straggler(beats: Sequence[Beat]) -> Beat | None:
    """Return the rank for which all others wait half of the time, while it hardly waits itself."""
    shares = sorted((beat.busy for beat in beats if beat.busy is not None), reverse=True)
    if len(shares) < max(2, len(beats)):
        return None
    usual = shares[(len(shares) + 1) // 2]
    busiest = next(beat for beat in beats if beat.busy == shares[0])
    return busiest if shares[0] > BUSY and usual < IDLE else None


def diagnosis(beats: Sequence[Beat], silent: Callable[[Beat], bool]) -> list[str]:
    """Say which rank holds the run up, and why; then list the ranks by phase, and its stack."""
    quiet, late, apart = [beat for beat in beats if silent(beat)], behind(beats), elsewhere(beats)
    if quiet:
        named, reason = quiet, f"in {quiet[0].place}, {who(quiet)} {described(quiet[0])}"
    elif late:
        verb = "is" if len(late) == 1 else "are"
        named, reason = late, f"{who(late)} {verb} behind, at {late[0].place}"
    elif apart:
        place = apart[0].stack[-1]
        named, reason = apart, f"{who(apart)} waits elsewhere than the others, at {place}"
    else:
        named, reason = [*beats[:1]], f"all ranks stand at the same place, {beats[0].place}"
    still = min(beat.still for beat in beats)
    head = f"the run stands still for {still:.0f} s: {reason}"
    lines = [head, *table(beats, silent)]
    if known := next((beat for beat in named if beat.stack), None):
        lines.append(f"  rank {known.rank} stands at")
        lines += [f"    {place}" for place in known.stack]
    return lines


def table(beats: Sequence[Beat], silent: Callable[[Beat], bool]) -> list[str]:
    groups: dict[tuple[str, bool], list[Beat]] = {}
    for beat in beats:
        groups.setdefault((beat.place, silent(beat)), []).append(beat)
    lines = []
    for (name, mute), group in list(groups.items())[:MOST_LINES]:
        still = min(beat.still for beat in group)
        lines.append(f"  {_numbers(group)}: {name}, for {still:.0f} s{', silent' * mute}")
    return lines


def elsewhere(beats: Sequence[Beat]) -> list[Beat]:
    """Return the ranks whose stacks differ from most others'; empty if none are known to."""
    groups: dict[tuple[str, ...], list[Beat]] = {}
    for beat in beats:
        groups.setdefault(beat.stack, []).append(beat)
    fewest = min(groups.values(), key=lambda group: (len(group), -group[0].rank))
    return fewest if len(groups) > 1 and fewest[0].stack else []


def state_of(process: int) -> str | None:
    """Return psutil's word for a process's state; None if it is gone, or hidden from this user."""
    with suppress(psutil.Error, ValueError):
        return psutil.Process(process).status()
    return None


def is_gone(process: int) -> bool:
    """Return True if a process of this machine has ended."""
    return state_of(process) in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def described(beat: Beat) -> str:
    if beat.host != socket.gethostname():
        return "gives no sign of life: its machine, its network or its process is gone or stopped"
    if is_gone(beat.process):
        return "is gone"
    known = {
        psutil.STATUS_STOPPED: "is stopped (SIGSTOP)",
        psutil.STATUS_DISK_SLEEP: "waits for a disk (state D)",
    }
    otherwise = "gives no sign of life, though its process is there"
    return known.get(state_of(beat.process), otherwise)


def who(beats: Sequence[Beat]) -> str:
    first = beats[0]
    more = f" and {len(beats) - 1} more" if len(beats) > 1 else ""
    return f"rank {first.rank} on {first.host} (process {first.process}){more}"


def _numbers(beats: Sequence[Beat]) -> str:
    numbers = [beat.rank for beat in beats]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    shown = ", ".join(map(str, numbers[:8]))
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"
