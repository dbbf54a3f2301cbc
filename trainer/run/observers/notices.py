"""Lines for the user while a run trains: why it stopped early, that it continues, that it waits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from rich.console import Console

from trainer.supervise.stall import Phase
from trainer.trackers import Record, say

SLOW = 0.1
"""The share of the time spent waiting for data above which the user is told."""
SIGN_SECONDS = 600.0
"""Seconds without a line, after which one is printed that the run continues."""


class Patience:
    """Ends a run after so many evaluations in a row without a lower held-out loss
    (`trainer.evaluation.patience`).

    A resumed run starts counting again.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lowest = math.inf
        self._at = 0
        self._since = 0

    def ends(self, step: int, loss: float) -> bool:
        """Return True if this evaluation was one too many; the same on every rank."""
        if loss < self._lowest:
            self._lowest = loss
            self._at = step
            self._since = 0
        else:
            self._since += 1
        return self.line is not None

    @property
    def line(self) -> str | None:
        """The reason for which it has ended the run, for the user; None before."""
        if self._limit is None or self._since < self._limit:
            return None
        lowest = f"the lowest was {self._lowest:.4g}, after step {self._at}"
        return f"stopped: the held-out loss has not fallen in {self._since} evaluations; {lowest}"


class SignOfLife:
    """Prints the step in progress, without a terminal and where logged steps are far apart."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._spoken = time.monotonic()

    def at(self, phase: Phase, step: int) -> None:
        now = time.monotonic()
        silent = not self._console.is_terminal and now - self._spoken > SIGN_SECONDS
        if phase is Phase.TRAINING and silent:
            self._spoken = now
            say(self._console, f"step {step}/{self._steps} is running")
        elif phase in (Phase.LOGGING, Phase.EVALUATING):
            self._spoken = now


class SlowData:
    """A note, given once, that the device waits for data, with what would help."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._logged = 0
        self._noted = False

    def lines(self, record: Record) -> Iterator[str]:
        self._logged += 1
        # the first steps wait for the start
        if record.speed.data_wait > SLOW and self._logged > 1 and not self._noted:
            self._noted = True
            waits = f"{record.speed.data_wait:.0%} of the time is spent waiting for data"
            yield f"note: {waits}: the loader is slower than the device{self._advice}"
