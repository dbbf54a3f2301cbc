"""The project's own launcher: starts a process per rank, passes signals on, waits for all, and
reports the end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainer.errors import MeshloomError, Preempted, Stalled
from trainer.supervise import status_files
from trainer.supervise.notes import FOLDER, LEAVE_SECONDS, LastWords, Notes
from trainer.supervise.signals import StopSignals
from trainer.supervise.world import environment_of, free_port

GRACE_SECONDS = 2.0
"""Seconds in which the others may end by themselves after one process has failed."""
CAUSE_SECONDS = 10.0
"""The same, while the failed ones only report that they lost another rank: its process may take
long to end.
"""
POLL_SECONDS = 0.05
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def start(count: int, arguments: Sequence[str] | Callable[[], NoReturn]) -> int:
    """Run Python with `arguments` once per process, or fork processes that call them; return the
    exit code of the cause of failure, else 0.

    A signal goes to all, and then they are waited for, since they may have to save; a second one
    ends them. When one fails, the others get `GRACE_SECONDS` and are then ended: no process is left
    behind. The last line is that of the cause."""
    with tempfile.TemporaryDirectory(prefix="meshloom-", ignore_cleanup_errors=True) as folder:
        return _Launcher(count, arguments, Path(folder)).run()


class _Forked(ForkProcess):
    """A forked child of this process, with the methods that `subprocess.Popen` has."""

    wait, returncode = ForkProcess.join, ForkProcess.exitcode

    def __init__(self, begin: Callable[[], NoReturn], environment: Mapping[str, str]) -> None:
        super().__init__(target=begin)
        self._environment = environment
        self.start()

    def run(self) -> None:
        StopSignals.deliver_to(signal.SIG_DFL)
        os.setsid()
        os.environ.update(self._environment)
        super().run()

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid or 0, number)


class _Launcher:
    def __init__(
        self, count: int, arguments: Sequence[str] | Callable[[], NoReturn], folder: Path
    ) -> None:
        self._count, self._arguments, self._folder = count, arguments, folder
        self._notes = Notes(folder)
        self._children: list[subprocess.Popen[bytes] | _Forked] = []
        self._received: list[int] = []
        self._ended: dict[int, float] = {}
        """The time when each ended rank was last seen alive, by the machine's clock."""
        self._looked = time.time()

    def run(self) -> int:
        StopSignals.deliver_to(self._receive)
        port = free_port()
        for rank in range(self._count):
            if not self._received:
                environment = {
                    **os.environ,
                    **environment_of(rank, self._count, port),
                    FOLDER: str(self._folder),
                }
                self._children.append(self._begun(environment))
        complete = len(self._children) == self._count
        while (
            complete and self._running() and not any(child.returncode for child in self._children)
        ):
            if self._overdue():
                break
            time.sleep(POLL_SECONDS)
        self._await()
        failed = cause(self._failures())  # before this process kills the rest
        code = 0 if failed is None else failed.code
        if not complete or self._too_young(code):
            failed, code = None, Preempted.exit_code
        if code == Preempted.exit_code:  # one of them alone was asked to stop
            self._send(signal.SIGTERM)
            self._await()
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
            child.wait()
        text, code = self._text(failed, code), 128 - code if code < 0 else code
        if len(self._received) > 1:
            name, code = signal.Signals(self._received[1]).name, 128 + self._received[1]
            text = (
                f"a second signal, {name}, ended the run at once; the same command goes on "
                "from "
                "its checkpoint"
            )
        if text:
            self._say(text)
        if code and (folder := self._notes.folder()) is not None:
            with suppress(OSError):  # a full disk may be the reason
                status_files.end(folder, code, text or f"exit code {code}")
        return code

    def _begun(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | _Forked:
        """Start a process in a session of its own, so that Ctrl-C comes once, from here."""
        if callable(self._arguments):
            return _Forked(self._arguments, environment)
        return subprocess.Popen(
            [sys.executable, *self._arguments], env=environment, start_new_session=True
        )

    def _receive(self, number: int, frame: FrameType | None = None) -> None:
        self._received.append(number)
        # ranks ignore a second signal that comes soon: some launchers send the first one twice
        self._send(number if len(self._received) == 1 else signal.SIGKILL)

    def _send(self, number: int) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _running(self) -> bool:
        """Return True if a process still runs."""
        before, self._looked = self._looked, time.time()
        for rank, child in enumerate(self._children):
            if child.poll() is not None:
                self._ended.setdefault(rank, before)
        return len(self._ended) < len(self._children)

    def _overdue(self) -> list[int]:
        """List the ranks that should have ended long ago, or that left the others waiting."""
        since = {rank: self._ended[rank] for rank in self._left()}
        running = [rank for rank in range(self._count) if rank not in self._ended]
        since |= {rank: at for rank in running if (at := self._notes.over(rank)) is not None}
        return [rank for rank, at in since.items() if time.time() - at > LEAVE_SECONDS]

    def _left(self) -> list[int]:
        """List the ranks that ended with 0 without reporting their end, as when a library ends the
        process.
        """
        return [
            r
            for r in self._ended
            if self._children[r].returncode == 0 and self._notes.over(r) is None
        ]

    def _failures(self) -> list[Failure]:
        """List the ranks that failed, or reported why they will."""
        found = []
        for rank, child in enumerate(self._children):
            if (words := self._notes.end(rank)) is not None:
                found.append(Failure(rank, words.code, words.at, words))
            elif (child.returncode or rank in self._left()) and rank in self._ended:
                found.append(
                    Failure(rank, child.returncode or MeshloomError.exit_code, self._ended[rank])
                )
        return found or [Failure(rank, Stalled.exit_code, self._looked) for rank in self._overdue()]

    def _too_young(self, code: int) -> bool:
        """Return True if a rank was asked to stop before it handled signals."""
        requested = self._received[0] if len(self._received) == 1 else 0
        return requested in StopSignals.NUMBERS and code in (-requested, 128 + requested)

    def _await(self) -> None:
        begun = time.monotonic()
        while self._running():
            failures = self._failures()
            unexplained = failures and all(failure.follows for failure in failures)
            if time.monotonic() - begun > (CAUSE_SECONDS if unexplained else GRACE_SECONDS):
                break
            time.sleep(POLL_SECONDS)

    def _text(self, failed: Failure | None, code: int) -> str:
        """Return the last line; empty after a good end, and if a process has reported for
        itself.
        """
        if failed is not None and failed.words is not None:
            return failed.words.text
        if code == Preempted.exit_code:
            reasons = (
                failure.words.text
                for failure in self._failures()
                if failure.words and failure.code == code
            )
            return next(reasons, "preempted: a signal asked the run to stop while it started")
        if failed is None:
            return ""
        if code < 0:
            return (
                f"{self._who(failed.rank)} was ended by "
                f"{signal.Signals(-code).name}{self._why(failed.rank, -code)}"
            )
        if failed.rank in self._left():
            return f"{self._who(failed.rank)} left with exit code 0 before the run was over"
        if failed.rank not in self._ended:
            after = (
                f"{LEAVE_SECONDS:.0f} s after its last word, and was killed: what the run "
                "saved is whole"
            )
            return f"{Stalled.kind}: {self._who(failed.rank)} had not ended {after}"
        return (
            f"{self._who(failed.rank)} ended with exit code {code}"
            if self._notes.place(failed.rank)
            else ""
        )

    def _why(self, rank: int, number: int) -> str:
        if number == signal.SIGKILL:
            return " (a person did it, or the kernel where memory ran out)"
        if number in CRASHES and (folder := self._notes.folder()) is not None:
            log = status_files.log_of(folder, rank)
            return f": a crash or an abort in native code; where it stood is at the end of {log}"
        return ""

    def _who(self, rank: int) -> str:
        place = self._notes.place(rank) or "while it started"
        return (
            f"rank {rank} on {socket.gethostname()} (process {self._children[rank].pid}, {place})"
        )

    def _say(self, text: str) -> None:
        """Print in a thread: nobody may read the pipe any more."""
        telling = threading.Thread(target=print, args=(text,), kwargs={"flush": True}, daemon=True)
        telling.start()
        telling.join(GRACE_SECONDS)


@dataclass(frozen=True)
class Failure:
    """A rank that failed, as the launcher saw it."""

    rank: int
    code: int
    """Its exit code; below zero: the signal that ended it."""
    at: float
    """The time when it was last seen alive, by the machine's clock."""
    words: LastWords | None = None

    @property
    def follows(self) -> bool:
        """True if it reports that it failed because of another one."""
        return self.words is not None and self.words.follows


def cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the first rank that failed by itself: processes neither end nor are seen to end in the
    order of causes.

    Those are the ranks that report an error, and those that a signal ended. Next are SIGABRT, with
    which libraries end a process, some when another rank is gone, and exit codes without a report.
    Last are ranks that report a lost connection.
    """
    return min(failures, key=_order, default=None)


def _order(failure: Failure) -> tuple[int, float, int]:
    if failure.words is not None:
        return (2 if failure.follows else 0), failure.words.at, failure.rank
    by_signal = failure.code < 0 and failure.code != -signal.SIGABRT
    return (0 if by_signal else 1), failure.at, failure.rank
