"""Signals that ask a run to stop: before its first step it leaves, from then on it saves and leaves."""

from __future__ import annotations

import os
import signal
import threading
import time

from trainer.errors import Preempted, Problem

PATIENCE_SECONDS = 3.0
"""How long the main thread may take to notice a signal: one that waits for another rank does not."""


class StopSignals:
    """From when it is made, the first signal asks, and the second ends the process at once."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received = False
        self._saving = self._failed = False
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(told,), name="signals", daemon=True).start()
        for number in self.NUMBERS:
            signal.signal(number, self._receive)

    def saving(self) -> None:
        """From now on the run looks at `received` and saves; until now a signal raised Preempted, on its rank alone."""
        self._saving = True
        if self.received:  # and a library swallowed what was raised
            raise preempted(0)

    def explain_failure(self, others: bool) -> bool:
        """Whether what failed is that this rank, or one of its `others`, was asked to leave with nothing to save.

        A launcher passes that on to all, but a lost connection may be noticed first.
        """
        self._failed = True
        deadline = time.monotonic() + PATIENCE_SECONDS
        while others and not self.received and not self._saving and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.received and not self._saving

    def release(self) -> None:
        """From now on a signal ends the process at once."""
        for number in self.NUMBERS:
            signal.signal(number, signal.SIG_DFL)

    def _receive(self, number: int, frame: object) -> None:
        self.received = True
        self.release()
        if not self._saving and not self._failed:
            raise preempted(0)

    def _watch(self, told: int) -> None:
        # written by the interpreter, whatever the main thread is waiting for; of libraries' signals too
        while os.read(told, 1)[0] not in self.NUMBERS:
            pass
        time.sleep(PATIENCE_SECONDS)
        if not self._saving:
            os._exit(Preempted.exit_code)


def preempted(saved_step: int) -> Preempted:
    """What a run that was asked to stop ends with; 0: before its first step."""
    seen = "a signal asked the run to stop, and all is saved" if saved_step else "a signal asked the run to stop"
    place = f"step {saved_step}" if saved_step else "before the first step"
    error = Preempted(Problem(place, seen, "to go on", "Run the same command again"))
    error.shared = True  # rank 0 tells it
    return error
