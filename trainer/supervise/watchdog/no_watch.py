"""A watchdog that does nothing."""

from __future__ import annotations

from trainer.supervise.stall import Phase


class NoWatch:
    """A watchdog that does nothing: for a process alone in the user's script, or a certificate."""

    place = "running"

    def at(self, phase: Phase, step: int | None = None) -> None: ...

    def plan(self, steps: int) -> None: ...

    def moves(self, seconds: float = 0.0) -> None: ...

    def close(self) -> None: ...
