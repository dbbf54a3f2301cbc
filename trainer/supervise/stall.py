"""The diagnosis of a run that hangs: from the beats of its ranks to a sentence and a table."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import psutil

from trainer.distributed.flight_record import Entered
from trainer.storage import Json


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
MOST_NAMED = 2
MOST_STACKS = 3
MOST_FRAMES = 8
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
"""The files of PyTorch in which the main thread is while it waits in a collective on the host."""
BUSY = 0.8
IDLE = 0.5
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
    """The stack of its main thread, innermost last; empty until it has hung for long."""
    threads: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names and stacks of its other threads that are at work, those in collectives last."""
    groups: tuple[Entered, ...] = ()
    """How far it is in the collectives of its groups; with the stack, and if PyTorch knows."""

    @property
    def place(self) -> str:
        return place(self.step, self.phase)

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, list(Phase).index(self.phase)


def beat_of(row: Json) -> Beat:
    """Return a beat from the parsed JSON of another rank's."""
    threads = tuple((name, tuple(stack)) for name, stack in row["threads"])
    groups = tuple(Entered(*one) for one in row["groups"])
    parts = {"stack": tuple(row["stack"]), "threads": threads, "groups": groups}
    return Beat(**{**row, **parts, "phase": Phase(row["phase"])})


def place(step: int, phase: Phase) -> str:
    return f"step {step}, {phase}" if step else phase


def behind(beats: Sequence[Beat]) -> list[Beat]:
    """Return the ranks that made the least progress; empty if all made the same."""
    least = min(beat.progress for beat in beats)
    late = [beat for beat in beats if beat.progress == least]
    return late if len(late) < len(beats) else []


def straggler(beats: Sequence[Beat]) -> Beat | None:
    """Return the rank that is busy for more than `BUSY` of its time, while most are not.

    At least half of the other ranks are then busy for less than `IDLE` of theirs. None if there is
    no such rank, or a rank's share is not known yet.
    """
    shares = sorted((beat.busy for beat in beats if beat.busy is not None), reverse=True)
    if len(shares) < max(2, len(beats)):
        return None
    usual = shares[(len(shares) + 1) // 2]
    busiest = next(beat for beat in beats if beat.busy == shares[0])
    return busiest if shares[0] > BUSY and usual < IDLE else None


def waits(beats: Sequence[Beat]) -> dict[int, set[int]]:
    """Return, for each rank that waits in a collective, the members that have not entered it."""
    members: dict[str, list[tuple[int, Entered]]] = {}
    for beat in beats:
        for one in beat.groups:
            members.setdefault(one.group, []).append((beat.rank, one))
    result: dict[int, set[int]] = {}
    for group in members.values():
        for rank, mine in group:
            absent = {other for other, theirs in group if mine.waits and not theirs.joins(mine)}
            if absent:
                result.setdefault(rank, set()).update(absent)
    return result


def outside(beats: Sequence[Beat]) -> list[Beat]:
    """Return the ranks that others wait for in a collective, while they wait for nobody.

    Empty if there is none, or if that is not known. Without PyTorch's record of collectives, the
    stacks decide.
    """
    if waiting := waits(beats):
        awaited = set().union(*waiting.values()) - waiting.keys()
        return [beat for beat in beats if beat.rank in awaited]
    known = [beat for beat in beats if beat.stack]
    out = [beat for beat in known if not in_collective(beat.stack)]
    return out if len(out) < len(known) else []


def in_collective(stack: Sequence[str]) -> bool:
    return any(file in place for place in stack for file in COLLECTIVES)


def diagnosis(beats: Sequence[Beat], silent: Callable[[Beat], bool]) -> list[str]:
    """Return lines for the user: the rank that blocks the run and why, all by phase, its stack."""
    named, reason = _cause(beats, silent)
    still = min(beat.still for beat in beats)
    head = f"no progress for {still:.0f} s: {reason}"
    lines = [head, *table(beats, silent)]
    shown = [beat for beat in named if beat.stack][:MOST_NAMED]
    stacks = [(f"rank {beat.rank} is", beat.stack) for beat in shown]
    stacks += [(f'its thread "{name}" is', at) for beat in shown for name, at in beat.threads]
    most = MOST_FRAMES // min(len(stacks) or 1, MOST_STACKS)
    for words, stack in stacks[:MOST_STACKS]:
        # the innermost lines: the whole text fits on a screen
        lines += [f"  {words} at", *(f"    {at}" for at in stack[-most:])]
    return lines


def _cause(beats: Sequence[Beat], silent: Callable[[Beat], bool]) -> tuple[Sequence[Beat], str]:
    """Return the ranks that hold the run up, and the reason."""
    if quiet := [beat for beat in beats if silent(beat)]:
        return quiet, f"in {quiet[0].place}, {who(quiet)} {described(quiet[0])}"
    late = behind(beats)
    out = outside(beats)
    if late and (not out or {beat.rank for beat in out} <= {beat.rank for beat in late}):
        late = out or late
        verb = "is" if len(late) == 1 else "are"
        return late, f"{who(late)} {verb} behind, at {late[0].place}{_thread(late[0])}"
    if out:
        verb = "is" if len(out) == 1 else "are"
        place = "the collective that the others wait in"
        return out, f"{who(out)} {verb} outside {place}, at {_line(out[0])}"
    if apart := elsewhere(beats):
        return apart, f"{who(apart)} waits elsewhere than the others, at {_line(apart[0])}"
    if ties := _ties(beats):
        each = " and ".join(f"{who(group)} at {_line(group[0])}" for group in ties)
        return [group[0] for group in ties], f"{each}: which one is wrong can't be told"
    first = beats[0]
    if thread := _thread(first):
        return [first], f"{who([first])} waits, in {first.place}{thread}"
    return [first], f"all ranks are at the same place, {first.place}"


def _line(beat: Beat) -> str:
    """Return the innermost line of a rank outside of PyTorch, and the function in there."""
    own = next((line for line in reversed(beat.stack) if not line.startswith("torch/")), "")
    if thread := _thread(beat):
        return f"{beat.place}{thread}"
    inner = beat.stack[-1] if beat.stack else "an unknown line"
    return f"{own}, in {inner.rpartition(' ')[2]}" if own and own != inner else inner


def _thread(beat: Beat) -> str:
    """Name the thread that works for a rank whose main thread waits; empty if none does."""
    busy = [(name, stack) for name, stack in beat.threads if not in_collective(stack)]
    if not busy or not (beat.stack and idle(beat.stack[-1])):
        return ""
    name, stack = busy[0]
    return f'; its thread "{name}" is at {stack[-1]}'


IDLE_FILES = ("threading.py", "queue.py", "futures/_base.py", "futures/thread.py", "selectors.py")
"""The ends of the files of Python in which a thread waits for another one."""


def idle(place: str) -> bool:
    """Return True if the innermost line of a stack waits for another thread."""
    return place.partition(":")[0].endswith(IDLE_FILES)


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
    groups = _by_stacks(beats)
    fewest = groups[-1]
    alone = len(groups) > 1 and len(fewest) < len(groups[-2]) and len(fewest) * 2 < len(beats)
    return fewest if alone and fewest[0].stack else []


def _ties(beats: Sequence[Beat]) -> list[list[Beat]]:
    """Return ranks by their stacks if these differ, and no group is more wrong than others."""
    groups = _by_stacks(beats)
    known = len(groups) > 1 and all(group[0].stack for group in groups)
    return sorted(groups, key=lambda group: group[0].rank)[:MOST_NAMED] if known else []


def _by_stacks(beats: Sequence[Beat]) -> list[list[Beat]]:
    """Return the ranks that are at one place, with their threads; the most first."""
    groups: dict[tuple[object, ...], list[Beat]] = {}
    for beat in beats:
        groups.setdefault((beat.stack, beat.threads), []).append(beat)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def state_of(process: int) -> str | None:
    """Return psutil's word for a process's state; None if it is gone, or hidden from this user."""
    with suppress(psutil.Error, ValueError):
        return psutil.Process(process).status()
    return None


def is_gone(process: int) -> bool:
    """Return True if a process of this machine has ended, or is hidden from this user."""
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


def waits_for(beats: Sequence[Beat]) -> list[Json]:
    """Return up to five ranks for which the others wait, for outside readers."""
    return [
        {"rank": beat.rank, "host": beat.host, "place": beat.place, "still": beat.still}
        for beat in behind(beats)[:5]
    ]
