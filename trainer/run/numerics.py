"""Steps whose gradient was not finite: the engines leave the weights unchanged, and the user is told."""

from __future__ import annotations

import math

from trainer.data.loader import StepBatches
from trainer.distributed.ranks import Ranks
from trainer.engines.engine import Metrics
from trainer.errors import MeshloomError, NumericsError, Problem, shared

IN_A_ROW = 3
_NAMED = 16
"""The most samples that one message lists."""


class Skipped:
    """Counts such steps, and ends the run after IN_A_ROW of them in a row.

    A float16 run skips steps by design while its loss scale settles; `watching` is then False.
    """

    def __init__(self, ranks: Ranks, watching: bool) -> None:
        self.total = 0
        self._ranks = ranks
        self._watching = watching
        self._row = 0
        self._recent: list[tuple[StepBatches, Metrics]] = []

    def note(self, batches: StepBatches, metrics: Metrics) -> None:
        """Note a step; `lines` checks it later, so that nothing waits here."""
        if self._watching:
            self._recent.append((StepBatches(batches.step, batches.ids, []), metrics))

    def lines(self) -> list[str]:
        """Return notes on the steps since the last call. Collective.

        Raises NumericsError, on every rank, if too many follow one another.
        """
        found = []
        for batches, metrics in self._recent:
            if not metrics.skipped and math.isfinite(float(metrics.gradient_norm)):
                self._row = 0
                continue
            self._row += 1
            self.total += 1
            mine = [int(index) for part in batches.ids for index in part]
            samples = sorted({index for theirs in self._ranks.gather(mine) for index in theirs})
            names = ", ".join(map(str, samples[:_NAMED])) + (", ..." if len(samples) > _NAMED else "")
            found.append(f"step {batches.step + 1} skipped: its gradient is not finite (samples {names})")
            if self._row == IN_A_ROW:
                raise self._too_many(batches.step + 1, names)
        self._recent = []
        return found

    def _too_many(self, step: int, names: str) -> MeshloomError:
        place, actual = f"steps {step - IN_A_ROW + 1} to {step}", f"no finite gradient {IN_A_ROW} times in a row"
        hint = f"Lower the learning rate, or look at the last samples ({names}); the last checkpoint is good"
        return shared(NumericsError(Problem(place, actual, "a finite gradient", hint)))
