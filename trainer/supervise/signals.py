"""Signals that ask a run to stop: before its first step it exits, later it saves and exits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType

from trainer.errors import MeshloomError, Stopped

PATIENCE_SECONDS = 3.0
"""Seconds in which the main thread must notice a signal; not if it waits for another rank."""
SAME_SECONDS = 5.0
"""Seconds in which a second signal is the same request: some launchers send it twice."""


class StopSignals:
    """Handles signals from now on: one asks the run to stop, one after SAME_SECONDS ends it."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.number = 0
        """The signal that asked this rank to stop; 0: none has."""
        self._unnoticed: Callable[[MeshloomError], object] | None = None
        self._saving = False
        self._failed = False
        self._at = 0.0
        self._after_save: MeshloomError | None = None
        wakes, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._woken = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(wakes,), name="signals", daemon=True).start()
        self.deliver_to(self._receive)

    @classmethod
    def deliver_to(
        cls, receive: Callable[[int, FrameType | None], object] | signal.Handlers
    ) -> None:
        """Call `receive` for signals from now on; not for SIGHUP if nohup had it ignored."""
        for number in cls.NUMBERS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, receive)

    @property
    def received(self) -> bool:
        return self.number != 0

    @property
    def error(self) -> MeshloomError:
        """The error that a signal raises while nothing has to be saved."""
        return self._after_save or stopped_early(self.number)

    def when_unnoticed(self, report: Callable[[MeshloomError], object]) -> None:
        """Call `report` before the end of a process whose main thread waits for another rank."""
        self._unnoticed = report

    def hand_over(self) -> None:
        """Let other code handle signals in this process, and decide when it ends."""
        self._saving = True

    def saving(self) -> None:
        """Let the run check `received` and save; before, a signal raises Stopped on its rank."""
        self._saving = True
        if self.received:  # a library swallowed the exception
            raise self.error

    def saved(self, error: MeshloomError) -> None:
        """Raise `error` at a signal from now on: all is saved, and the rest can be done later."""
        self._after_save = error
        self._saving = False
        if self.received:  # while it was saved
            raise error

    def explain_failure(self, others: bool) -> bool:
        """Return True if a request to stop caused a failure of this rank, with nothing to save.

        A launcher passes the signal to all ranks, but a lost connection may be noticed before it.
        """
        self._failed = True
        deadline = time.monotonic() + PATIENCE_SECONDS
        while others and not self.received and not self._saving and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.received and not self._saving

    def release(self) -> None:
        """End the handling: a signal now ends the process at once, unless it repeats the first."""
        self.deliver_to(signal.SIG_IGN if self.received else signal.SIG_DFL)

    def close(self) -> None:
        self.hand_over()
        signal.set_wakeup_fd(self._woken)
        os.close(self._tell)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and time.monotonic() - self._at > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.received:
            return
        self.number = number
        self._at = time.monotonic()
        if not self._saving and not self._failed:
            raise self.error

    def _watch(self, wakes: int) -> None:
        # the interpreter writes there, whatever the main thread waits for, also libraries' signals
        while (written := os.read(wakes, 1)) and written[0] not in self.NUMBERS:
            pass
        if not written:
            os.close(wakes)
            return
        time.sleep(PATIENCE_SECONDS)
        if not self._saving:
            # the main thread, which would note it, does not run
            error = self._after_save or stopped_early(written[0])
            if self._unnoticed is not None:
                self._unnoticed(error)
            os._exit(error.exit_code)


class NoSignals:
    """A stand-in in threads other than the main one, which alone gets signals."""

    number = 0
    received = False

    def saving(self) -> None: ...

    def saved(self, error: MeshloomError) -> None: ...


Signals = StopSignals | NoSignals


@contextmanager
def borrowed() -> Iterator[bool]:
    """Restore signal handlers at the end; yield False outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = {number: signal.getsignal(number) for number in StopSignals.NUMBERS}
    try:
        yield True
    finally:
        for number, receive in before.items():
            signal.signal(number, signal.SIG_DFL if receive is None else receive)


@contextmanager
def stop_signals() -> Iterator[Signals]:
    """Let signals ask the run to stop while it lasts, as under the command."""
    with borrowed() as hears:
        if not hears:
            yield NoSignals()
            return
        with closing(StopSignals()) as signals:
            try:
                yield signals
            except Exception as error:
                if isinstance(error, MeshloomError) or not signals.explain_failure(others=True):
                    raise
                raise signals.error from error


def stopped_early(number: int) -> Stopped:
    """Build the error of a run that signal `number` ended before its first step.

    Number 0 is an unknown signal.
    """
    message = f"stopped by {_name(number)} before the first step"
    return Stopped(message, "Run the same command to start it again").share()


def stopped_at(step: int, number: int) -> Stopped:
    """Build the error of a run that signal `number` ended after a step, which is saved."""
    message = f"stopped by {_name(number)} at step {step}; checkpoint saved"
    return Stopped(message, "Run the same command to resume").share()


def _name(number: int) -> str:
    return signal.Signals(number).name if number else "a signal"
