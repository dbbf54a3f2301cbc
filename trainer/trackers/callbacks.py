"""`Callback`: a script's own code at the events of a run, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, Problem
from trainer.trackers.tracker import Evaluation, Record

if TYPE_CHECKING:
    from torch import nn


class Callback:
    """The events of a run; override some. All ranks call them at the same steps, and wait for one
    another: they may communicate, and an error on one rank ends the run on all.

    If `on_step_end`, `on_log` or `on_evaluate` returns True on any rank, the run ends after this
    step, with a checkpoint and the model in `final/`.
    """

    def on_train_begin(self, folder: Path, modules: Sequence[nn.Module]) -> None:
        """Called before the first step; `modules`: this rank's model, or pipeline stages."""

    def on_step_end(self, step: int) -> bool | None:
        """Called after each step, from 1; the device may still be working on it."""

    def on_log(self, record: Record) -> bool | None:
        """Called after each logged step (`trainer.log.every`)."""

    def on_evaluate(self, evaluation: Evaluation) -> bool | None:
        """Called after each evaluation."""

    def on_save(self, step: int) -> None:
        """Called after each checkpoint; an asynchronous one may still be written."""

    def on_train_end(self, folder: Path) -> None:
        """Called once the model is in `final/`; not if a signal or an error ended the run."""


EVENTS = [name for name in vars(Callback) if name.startswith("on_")]
ENDING = ("on_step_end", "on_log", "on_evaluate")
"""The events whose results count."""


class Callbacks:
    """The callbacks of a run, on every rank."""

    def __init__(self, callbacks: Sequence[Callback], ranks: Ranks) -> None:
        self._callbacks = callbacks
        self._ranks = ranks
        self._any = ranks.any(bool(callbacks))
        self.ended = False
        """True once one has ended the run; the same on every rank."""

    @staticmethod
    def check(callbacks: Sequence[Callback]) -> None:
        """Raise ConfigError for what is no callback, and for a misspelt event."""
        if not isinstance(callbacks, Sequence):
            expected = "a list of objects of subclasses of meshloom.Callback"
            raise ConfigError(Problem("callbacks", type(callbacks).__name__, expected))
        for one in callbacks:
            odd = [name for name in dir(one) if name.startswith("on_") and name not in EVENTS]
            if odd or not isinstance(one, Callback):
                actual = " with ".join([type(one).__name__, *odd[:1]])
                events = ", ".join(EVENTS)
                expected = f"an object of a subclass of meshloom.Callback, with {events}"
                raise ConfigError(Problem("callbacks", actual, expected))

    def call(self, event: str, *values: object) -> bool:
        """Call an event of each; return `ended`. Collective. Raises on all ranks if one does."""
        if self._any:
            called = lambda: [bool(getattr(one, event)(*values)) for one in self._callbacks]  # noqa: E731
            ends = any(self._ranks.on_own(called)) and event in ENDING
            self.ended |= event in ENDING and self._ranks.any(ends)
        return self.ended
