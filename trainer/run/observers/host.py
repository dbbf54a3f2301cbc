"""Python's garbage collection, at the same steps on each rank."""

from __future__ import annotations

import gc

from trainer.supervise.stall import Phase


class Garbage:
    """Collects Python's garbage between steps, at the same ones on each rank, and not when
    allocations happen to reach a threshold: the pause of any rank is one of all."""

    EVERY = 50

    def __enter__(self) -> Garbage:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()  # the model, the libraries: they stay, and are not looked through again
        gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def at(self, phase: Phase, step: int) -> None:
        """Collect before an evaluation or a save, and before every 50th step."""
        every = phase is Phase.WAITING and step % self.EVERY == 0
        if every or phase in (Phase.EVALUATING, Phase.SAVING):
            gc.collect()
