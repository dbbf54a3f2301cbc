"""The project's launcher for one machine: starts its ranks, passes signals on, reports the end.

torch's `elastic_launch` (2.15) does not hold to docs/ends.md: it stops all ranks at the first end,
whoever is the cause, waits for good if one leaves with 0, takes their store along when it is
killed, does not end them at a second signal, and imports for 6 s, which the ranks do as well.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainer.errors import MeshloomError, NumericsError, Stalled, Stopped
from trainer.supervise import status_files
from trainer.supervise.forked import ForkedRank
from trainer.supervise.notes import FOLDER, LEAVE_SECONDS, Failure, Notes
from trainer.supervise.signals import StopSignals, stopped_early
from trainer.supervise.world import environment_of, reserved_port

GRACE_SECONDS = 2.0
"""Seconds in which the others may end by themselves after one process has failed."""
CAUSE_SECONDS = 10.0
"""Seconds for that while all failed ones lost another rank, whose process may take long to end."""
POLL_SECONDS = 0.05
Arguments = Sequence[str] | Callable[[], NoReturn]
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def start(count: int, arguments: Arguments) -> int:
    """Run Python with `arguments` in `count` ranks, or call them in forks; return the exit code.

    A signal goes to all, and then they are waited for, since they may have to save; a second one
    ends them. When one fails, the others get `GRACE_SECONDS` and are then ended: no process is left
    behind. The exit code and the last line are those of the cause.
    """
    with tempfile.TemporaryDirectory(prefix="meshloom-", ignore_cleanup_errors=True) as folder:
        return _Launcher(count, arguments, Path(folder)).run()


class _ForkedInSession(ForkedRank):
    def run(self) -> None:
        os.setsid()
        super().run()


Process = subprocess.Popen[bytes] | _ForkedInSession


class _Rank:
    """A rank's process, in a session of its own so that Ctrl-C comes once, and its notes."""

    def __init__(self, number: int, process: Process, notes: Notes) -> None:
        self.number = number
        self.process = process
        self._notes = notes
        self.ended: float | None = None
        """The time when it was last seen alive, by the machine's clock, once it has ended."""
        self._looked = time.time()

    def runs(self) -> bool:
        """Look if it runs; return True if it does."""
        before = self._looked
        self._looked = time.time()
        if self.ended is None and self.process.poll() is not None:
            self.ended = before
        return self.ended is None

    @property
    def left(self) -> bool:
        """True if it ended with 0 unannounced, as when a library ends the process."""
        good = self.ended is not None and self.process.returncode == 0
        return good and self._notes.announced(self.number) is None

    def overdue(self) -> bool:
        """Return True if it should have ended long ago, or has left the others waiting."""
        since = self._notes.announced(self.number) if self.ended is None else None
        if self.left:
            since = self.ended
        return since is not None and time.time() - since > LEAVE_SECONDS

    def failure(self) -> Failure | None:
        """Return its failure, as it reports it or as it is seen; None if it has not failed."""
        if (reported := self._notes.end(self.number)) is not None:
            return reported
        if self.ended is None or not (self.process.returncode or self.left):
            return None
        return Failure(self.number, self.process.returncode or MeshloomError.exit_code, self.ended)

    def described(self, code: int) -> str:
        """Describe a failure without a report; empty if the rank itself has printed what it is.

        Before its first note it has, and so has `verify` with its verdict.
        """
        place = self._notes.place(self.number)
        at = f"process {self.process.pid}, {place or 'while it started'}"
        who = f"rank {self.number} on {socket.gethostname()} ({at})"
        if code < 0:
            return f"{who} was ended by {signal.Signals(-code).name}{self._why(-code)}"
        if self.left:
            return f"{who} left with exit code 0 before the run was over"
        if self.ended is None:
            after = f"{LEAVE_SECONDS:.0f} s after its last word, and was killed"
            return f"{Stalled.kind}: {who} had not ended {after}: what the run saved is whole"
        printed = not place or code == NumericsError.exit_code
        return "" if printed else f"{who} ended with exit code {code}"

    def _why(self, number: int) -> str:
        if number == signal.SIGKILL:
            return " (by a person, or by the kernel if memory ran out)"
        if number in CRASHES and (folder := self._notes.folder()) is not None:
            log = status_files.log_of(folder, self.number)
            return f": a crash or an abort in native code; the end of {log} has the stacks"
        return ""


class _Launcher:
    def __init__(self, count: int, arguments: Arguments, folder: Path) -> None:
        self._count = count
        self._arguments = arguments
        self._folder = folder
        self._notes = Notes(folder)
        self._ranks: list[_Rank] = []
        self._received: list[int] = []

    def run(self) -> int:
        StopSignals.deliver_to(self._receive)
        with reserved_port() as port:
            for number in range(self._count):
                if not self._received:
                    self._ranks.append(_Rank(number, self._begun(number, port), self._notes))
            while len(self._ranks) == self._count and self._all_go_on():
                time.sleep(POLL_SECONDS)
            failed = self._awaited_cause()
            for rank in self._ranks:
                rank.process.send_signal(signal.SIGKILL)
                rank.process.wait()
        text = ""
        code = 0
        if failed is not None:
            code = 128 - failed.code if failed.code < 0 else failed.code
            text = failed.text or self._ranks[failed.rank].described(failed.code)
        if len(self._received) > 1:
            name = signal.Signals(self._received[1]).name
            code = 128 + self._received[1]
            after = "the same command resumes from its checkpoint"
            text = f"a second signal, {name}, ended the run at once; {after}"
        if text:
            self._say(text)
        if code and (folder := self._notes.folder()) is not None:
            with suppress(OSError):  # a full disk may be the reason
                status_files.end(folder, code, text or f"exit code {code}")
        return code

    def _begun(self, number: int, port: int) -> Process:
        own = environment_of(number, self._count, port) | {FOLDER: str(self._folder)}
        if callable(self._arguments):
            return _ForkedInSession(self._arguments, own)
        command = [sys.executable, *self._arguments]
        return subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True)

    def _receive(self, number: int, frame: FrameType | None = None) -> None:
        self._received.append(number)
        # ranks ignore a second signal that comes soon: some launchers send the first one twice
        self._send(number if len(self._received) == 1 else signal.SIGKILL)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            rank.process.send_signal(number)

    def _running(self) -> bool:
        return any([rank.runs() for rank in self._ranks])  # each is looked at

    def _all_go_on(self) -> bool:
        """Return True if some ranks run, and none has failed or should have ended long ago."""
        runs = self._running()
        return runs and not any(rank.process.returncode or rank.overdue() for rank in self._ranks)

    def _awaited_cause(self) -> Failure | None:
        """Wait a while for the ends of all ranks; return the cause of failure, if there is one."""
        self._await_ends()
        failed = cause(self._failures())
        code = 0 if failed is None else failed.code
        unready = len(self._ranks) < self._count or self._before_handlers(code)
        if not unready and code != Stopped.exit_code:
            return failed
        self._send(signal.SIGTERM)  # one of them alone was asked to stop
        self._await_ends()
        reports = [end for end in self._failures() if end.code == Stopped.exit_code and end.text]
        text = stopped_early(self._received[0] if self._received else 0).render()
        return cause(reports) or Failure(0, Stopped.exit_code, time.time(), text)

    def _failures(self) -> list[Failure]:
        """List the failures of ranks; if there are none, those that are overdue."""
        failures = [failure for rank in self._ranks if (failure := rank.failure()) is not None]
        overdue = [rank.number for rank in self._ranks if rank.overdue()]
        stalled = [Failure(number, Stalled.exit_code, time.time()) for number in overdue]
        return failures or stalled

    def _before_handlers(self, code: int) -> bool:
        """Return True if a rank was asked to stop before it handled signals."""
        number = self._received[0] if len(self._received) == 1 else 0
        return number in StopSignals.NUMBERS and code in (-number, 128 + number)

    def _await_ends(self) -> None:
        begun = time.monotonic()
        while self._running():
            failures = self._failures()
            unexplained = failures and all(failure.follows for failure in failures)
            if time.monotonic() - begun > (CAUSE_SECONDS if unexplained else GRACE_SECONDS):
                break
            time.sleep(POLL_SECONDS)

    def _say(self, text: str) -> None:
        """Print in a thread: nobody may read the pipe any more."""
        thread = threading.Thread(target=print, args=(text,), kwargs={"flush": True}, daemon=True)
        thread.start()
        thread.join(GRACE_SECONDS)


def cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the first rank that failed by itself; processes are not seen to end in that order.

    Those are the ranks that report an error, and those that a signal ended. Next are SIGABRT, with
    which libraries end a process, some when another rank is gone, and exit codes without a report.
    Last are ranks that report a lost connection.
    """
    return min(failures, key=_order, default=None)


def _order(failure: Failure) -> tuple[int, float, int]:
    if failure.text:
        return (2 if failure.follows else 0), failure.at, failure.rank
    by_signal = failure.code < 0 and failure.code != -signal.SIGABRT
    return (0 if by_signal else 1), failure.at, failure.rank
