"""The watchdog in each rank: says what it does, and ends a run that hangs, naming the culprit."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple, NoReturn

from trainer.distributed.flight_record import entered
from trainer.errors import Stalled
from trainer.storage import Json
from trainer.supervise import stall
from trainer.supervise.stall import Beat, Phase, is_gone, who
from trainer.supervise.watchdog.beat_store import BeatStore, in_time
from trainer.supervise.watchdog.heard import Heard
from trainer.supervise.watchdog.stacks import main_frame, stack_of, working_threads, works

FIRST_STEP = 5.0
"""The factor by which the first step may take longer: kernels are compiled and buffers made."""
LEAST_SECONDS = 120.0
STEPS = 10.0
"""The patience if none is given: at least these seconds, and this many times the median step."""
BEAT_SECONDS = 1.0
DOUBTFUL_SECONDS = 4.0
SILENT_SECONDS = 10.0
ANSWER_SECONDS = 8.0
"""Seconds that the rank that reports for all may take."""
READERS = (0, 1)
"""The ranks that read all beats each second: the first, and one that sees the first fall silent."""
NEIGHBOURS = 8
"""The ranks before its own that another one reads when it makes no progress, besides the first."""
SILENT_PHASES = {Phase.PREPARING: 5.0, Phase.BUILDING: 5.0}
"""Multiples of its patience for which a rank may be silent: to parse may hold the interpreter."""
SAMPLES = 60
"""The number of beats over which slow ranks are found."""


class WatchReports(NamedTuple):
    """The functions that a watchdog calls."""

    stalled: Callable[[list[str]], None]
    """Called before each process ends: with the diagnosis in the one that reports for all, else
    without lines."""
    progress: Callable[[Mapping[str, object]], None] = lambda status: None
    """Called at each beat with the status for outside readers, on rank 0 of all ranks."""
    slow: Callable[[str], None] = lambda line: None
    """Called on rank 0, once for each rank that the others wait for."""


class Watch:
    """Sends beats over a connection and from a thread of its own: no step waits for them.

    `processes`: host and process of each rank, exchanged at the rendezvous, which name one that is
    silent later.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[tuple[str, int]],
        store: object,
        patience: float | None,
        reports: WatchReports,
    ) -> None:
        self._rank = rank
        self._given = patience
        self._reports = reports
        self._world_size = len(processes)
        self.first = processes[0]
        self._phase = Phase.PREPARING
        self._step = 0
        self._moved = time.monotonic()
        self._begins: Callable[[str], None] = lambda place: None
        self._first: int | None = None
        self._steps: deque[float] = deque(maxlen=101)
        self._begun = self._moved
        self._number = 0
        self._others = Heard(rank, processes)
        self._lower = sorted({0, *range(max(rank - NEIGHBOURS, 0), rank)} - {rank})
        self._complete = False
        """True while all beats are read."""
        self._answered = time.monotonic()
        self._closed = threading.Event()
        self._unanswered = self._told = False
        self._planned: int | None = None
        self._samples: deque[bool] = deque(maxlen=SAMPLES)
        self._slow: set[int] = set()
        self._store = BeatStore(store, SILENT_SECONDS) if self._world_size > 1 else None
        if self._store is not None:
            self._say()
        self._beats_thread = threading.Thread(target=self._beat, name="watch", daemon=True)
        self._beats_thread.start()
        threading.Thread(target=self._judge, name="judge", daemon=True).start()

    # called by the run

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase, of `step` if one is given."""
        now = time.monotonic()
        if phase is Phase.WAITING and step is not None:
            if self._first is None:
                self._first = step
            elif self._step > self._first:
                self._steps.append(now - self._begun)
            self._begun = now
        self._phase = phase
        self._step = self._step if step is None else step
        self._moved = now
        self._begins(self.place)

    def on_phase(self, begins: Callable[[str], None]) -> None:
        """Call `begins` with the step and phase, now and before each phase."""
        self._begins = begins
        begins(self.place)

    def plan(self, steps: int) -> None:
        """Note the number of steps of the whole run."""
        self._planned = steps

    def moves(self, seconds: float = 0.0) -> None:
        """Note progress within the phase; it may rightly show none for the next `seconds`."""
        self._moved = time.monotonic() + seconds

    def close(self) -> None:
        """Stop, and wait for a beat on its way.

        A thread that is in a call of the store when the interpreter ends would abort the process.
        """
        self._closed.set()
        self._beats_thread.join(BEAT_SECONDS)

    # read by others

    @property
    def place(self) -> str:
        return stall.place(self._step, self._phase)

    def fails_first(self) -> bool:
        """Return True if no other rank has failed before, or the store is gone."""
        if self._unanswered:
            return self._rank == 1
        try:
            return self._store is None or self._store.count("failed", 1) == 1
        except Exception:  # rank 0 had the store
            return True

    def somebody_failed(self) -> bool:
        try:
            return self._store is not None and self._store.count("failed", 0) > 0
        except Exception:
            return False

    def gone(self) -> list[Beat]:
        """Return the ranks that ended on this machine, or have fallen silent on another one."""
        answered = False
        with suppress(Exception):  # earlier beats still count
            self._read(self._others.ranks)
            answered = True
        gone = []
        for rank in self._others.ranks:
            beat = self._others.last(rank)
            # without the store no beats arrive, and only rank 0's silence explains that
            silent = self._silent(beat) and (answered or rank == 0)
            ended = is_gone(beat.process) if beat.host == socket.gethostname() else silent
            if ended and beat.phase is not Phase.LEAVING:
                gone.append(beat)
        return gone

    # the threads

    def _limit(self, phase: Phase, step: int) -> float:
        """Return the seconds that a rank may take without progress in `phase` of `step`."""
        return self._patience() * max(phase.patience, FIRST_STEP if step == self._first else 1.0)

    def _patience(self) -> float:
        """Return the seconds that a usual step may take without progress, or its rank be silent."""
        median = statistics.median(self._steps) if self._steps else 0.0
        return self._given or max(LEAST_SECONDS, STEPS * median)

    def _mine(self) -> Beat:
        still = max(0.0, time.monotonic() - self._moved)
        shown: Json = {}
        if still > self._patience() / 2:
            shown = {
                "stack": stack_of(main_frame()),
                "threads": working_threads(),
                "groups": entered(),
            }
        busy = sum(self._samples) / SAMPLES if len(self._samples) == SAMPLES else None
        me = self._rank, socket.gethostname(), os.getpid()
        return Beat(*me, self._phase, self._step, still, self._number, busy, **shown)

    def _say(self) -> None:
        self._number += 1
        beat = self._mine()
        if self._store is not None:
            self._store.put(beat)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                if self._phase in (Phase.TRAINING, Phase.WAITING):
                    self._samples.append(works())
                self._say()
                still = time.monotonic() - self._moved
                reads_all = self._reads_all(still)
                if reads_all:
                    self._read(self._others.ranks)
                self._complete = reads_all
                if self._store is not None and still > self._patience():
                    self._told = self._store.has_verdict()
                self._answered = time.monotonic()
            except Exception:  # `_judge` sees that there was no answer
                continue
            if self._rank == 0:
                self._tell_slow()
            with suppress(OSError):  # the run itself reports a full disk
                self._reports.progress(self.status())

    def _reads_all(self, still: float) -> bool:
        """Return True if this rank has to know all: a reader, or one that hangs, if those
        that would report before it are silent. The store could not serve all ranks all beats."""
        if self._rank in READERS or still <= self._limit(self._phase, self._step) / 2:
            return self._rank in READERS
        self._read(self._lower)
        return all(self._silent(self._others.last(rank)) for rank in self._lower)

    def _tell_slow(self) -> None:
        slow = stall.straggler(self._beats())
        if slow is not None and slow.rank not in self._slow:
            self._slow.add(slow.rank)
            reason = "it is slower than they are"
            self._reports.slow(
                f"note: the others wait for {who([slow])} most of the time: {reason}"
            )

    def _read(self, ranks: Collection[int]) -> None:
        """Read others' beats, the last known of silent ranks. Raises the store's errors."""
        if self._store is None:
            return
        unheard = any(self._others.last(rank).number == 0 for rank in ranks)
        self._others.note(self._store.beats(ranks, some_missing=unheard))

    def _beats(self) -> list[Beat]:
        """Return each rank's last beat, with its seconds without progress up to now."""
        return sorted([self._mine(), *self._others.up_to_now()], key=lambda beat: beat.rank)

    def _silent(self, beat: Beat) -> bool:
        return self._unheard(beat) > SILENT_SECONDS

    def _unheard(self, beat: Beat) -> float:
        return self._others.seconds_since(beat.rank)

    def _lost(self, beats: Sequence[Beat]) -> bool:
        """Return True if a rank is silent for longer than it may; only READERS can tell."""
        patience = self._patience()
        return self._rank in READERS and any(
            self._unheard(beat) > max(SILENT_SECONDS, patience * SILENT_PHASES.get(beat.phase, 1.0))
            for beat in beats
        )

    def status(self) -> Json:
        """Return the status for outside readers, of all ranks as far as this one knows."""
        status = asdict(self._mine())
        for name in ("stack", "threads", "groups", "number", "rank"):
            del status[name]
        return {
            **status,
            "place": self.place,
            "steps": self._planned,
            "ranks": self._world_size,
            "limit": self._limit(self._phase, self._step),
            "waits_for": stall.waits_for(self._beats()),
        }

    def _judge(self) -> None:
        while not self._closed.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            patience = self._patience()
            if (still := now - self._moved) <= patience:
                continue
            if self._told:
                self._end([])
            least = SILENT_SECONDS + 2 * BEAT_SECONDS
            least = least if still > self._limit(self._phase, self._step) else max(least, patience)
            if self._store is not None and now - self._answered > least:
                self._unanswered = True
                self._end(self._no_answer())
            beats = self._beats()
            lost = self._lost(beats)  # then nobody has to wait for as long as its phase may take
            if self._knows(beats) and all(
                beat.still > (patience if lost else self._limit(beat.phase, beat.step))
                for beat in beats
            ):
                self._verdict(beats)

    def _knows(self, beats: Sequence[Beat]) -> bool:
        """Return True if the store answers, and each rank is silent, or heard with its stack."""
        lately = time.monotonic() - self._answered < DOUBTFUL_SECONDS
        answers = self._store is None or (self._complete and lately)
        return answers and all(
            self._silent(beat) or (beat.stack and self._unheard(beat) <= DOUBTFUL_SECONDS)
            for beat in beats
        )

    def _no_answer(self) -> list[str]:
        """Describe a store that is gone or hangs, with the process of rank 0 or its launcher."""
        first = next(beat for beat in self._beats() if beat.rank == 0)
        reason = f"in {first.place}, {who([first])} {stall.described(first)}"
        return [f"no progress: {reason}", *stall.table([self._mine()], self._silent)]

    def _verdict(self, beats: list[Beat]) -> None:
        heard = [beat.rank for beat in beats if not self._silent(beat)]
        if min(heard) != self._rank and in_time(self._await_verdict, ANSWER_SECONDS):
            self._end([])
        self._end(stall.diagnosis(beats, self._silent), len(heard))

    def _await_verdict(self) -> None:
        assert self._store is not None
        while not self._store.has_verdict():
            time.sleep(BEAT_SECONDS / 4)

    def _end(self, lines: list[str], ranks: int = 0) -> NoReturn:
        """End the process, with a diagnosis or after another's, once its `ranks` left records."""

        def tell() -> None:
            self._reports.stalled(lines)
            if self._store is None or self._unanswered:
                return
            with suppress(Exception):  # of the process that serves the store, which may end first
                if lines:
                    self._store.give_verdict(ranks)
                self._store.count("left", 1)
                # a launcher kills the others soon after the first one has ended
                while self._store.count("left", 0) < self._store.records():
                    time.sleep(BEAT_SECONDS / 4)

        in_time(tell, ANSWER_SECONDS)
        os._exit(Stalled.exit_code)
