"""The `Record` of a logged step and the loss of an epoch, where the host waits; and steps that
changed nothing."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trainer.data.loader import StepBatches
from trainer.distributed.ranks import Ranks
from trainer.engines.engine import Metrics
from trainer.errors import NumericsError, Problem
from trainer.optim.lr_schedules import Update
from trainer.state import RunState
from trainer.trackers import Record, Speed


class Pace:
    """Seconds a step, over all that were recorded. The first record counts until there is another:
    its steps compile and allocate."""

    def __init__(self) -> None:
        self._records = 0
        self._steps = 0
        self._seconds = 0.0

    def take(self, steps: int, seconds: float) -> float:
        """Return the pace with these steps, which took so long."""
        if self._records == 1:
            self._steps = 0
            self._seconds = 0.0
        self._records += 1
        self._steps += steps
        self._seconds += seconds
        return self._seconds / self._steps


@dataclass
class Meter:
    """Measures steps; made when the first starts, each call covers those since the last."""

    total_steps: int
    device: torch.device
    sharers: int
    """The number of devices that work on one data rank's samples."""
    flops_per_token: float | None
    """FLOPs per token; None if unknown."""
    peak_flops: float | None
    state: RunState
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    """Seconds of waiting for data since the last record."""
    positions: int = 0
    """Tokens since the last record on this data rank, padding included."""
    pace: Pace = field(default_factory=Pace)

    def note(self, batches: StepBatches) -> None:
        """Note a step, without waiting for the device."""
        self.waited += batches.waited_seconds
        self.positions += batches.positions

    def record(self, state: RunState, metrics: Metrics, update: Update, skipped: int) -> Record:
        """Record the steps since the last call; `skipped` is the number so far that changed
        nothing. Collective.

        Raises NumericsError if the loss is not finite but the gradient is: the step was then taken.
        """
        loss = float(metrics.loss())
        norm = float(metrics.gradient_norm)
        if not math.isfinite(loss) and math.isfinite(norm) and not metrics.skipped:
            place = f"step {state.step}"
            actual = f"the loss is {loss}"
            hint = "Lower the learning rate, clip gradients, or look at the samples of this step"
            raise NumericsError(Problem(place, actual, hint=hint))
        now = time.perf_counter()
        elapsed = now - self.started
        steps = state.step - self.state.step
        rate = (state.tokens - self.state.tokens) / elapsed
        # the device computes all positions, targets or not
        mfu = None
        if self.peak_flops and self.flops_per_token:
            flops = self.positions * self.flops_per_token
            mfu = flops / elapsed / (self.peak_flops * self.sharers)
        record = Record(
            step=state.step,
            total_steps=self.total_steps,
            samples=state.samples,
            tokens=state.tokens,
            loss=loss,
            learning_rate=update.learning_rate,
            gradient_norm=norm,
            speed=Speed(
                tokens_per_second=rate,
                step_seconds=elapsed / steps,
                mfu=mfu,
                data_wait=min(1.0, self.waited / elapsed),
                eta_seconds=(self.total_steps - state.step) * self.pace.take(steps, elapsed),
            ),
            memory_gib=_peak_memory(self.device) / 2**30,
            skipped=skipped,
            loss_scale=state.engine.get("scaler.cur_scale"),
        )
        self.started = now
        self.state = state
        self.waited = 0.0
        self.positions = 0
        return record


class EpochLoss:
    """The mean loss of the steps since an epoch began, nats per target.

    Steps that changed nothing do not count: in an epoch of those alone it is NaN. `before`: the
    `sums` of a checkpoint in the middle of the epoch, from which the run was resumed.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._before = (before["loss"], before["targets"]) if before else (0.0, 0.0)
        self._sums: torch.Tensor | None = None
        self._group: dist.ProcessGroup | None = None

    def note(self, metrics: Metrics) -> None:
        """Note a step before its loss is read, without waiting for the device."""
        if metrics.skipped:
            return
        sums = torch.stack([metrics.loss_sum.detach().double(), metrics.targets.double()])
        taken = torch.isfinite(metrics.gradient_norm).to(sums.device)
        sums = sums.where(taken, torch.zeros_like(sums))
        self._sums = sums if self._sums is None else self._sums + sums
        self._group = metrics.group

    def take(self) -> float:
        """Return the mean, and begin the next epoch. Collective."""
        loss, targets = self._totals()
        self._before = (0.0, 0.0)
        self._sums = None
        return loss / targets if targets else math.nan

    def sums(self) -> dict[str, float] | None:
        """Return the sums of loss and targets, for a checkpoint; None if they are not finite.
        Collective.
        """
        loss, targets = self._totals()
        return {"loss": loss, "targets": targets} if math.isfinite(loss) else None

    def _totals(self) -> tuple[float, float]:
        """Return the sums over all ranks, which each rank then has."""
        if self._sums is None:
            return self._before
        sums = self._sums.clone()
        if self._group is not None:
            dist.all_reduce(sums[:1], group=self._group)
        loss, targets = sums.tolist()
        return self._before[0] + loss, self._before[1] + targets


def _peak_memory(device: torch.device) -> int:
    """Return the peak bytes that torch allocated on a GPU, or the largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


IN_A_ROW = 3
_NAMED = 16
"""The most samples that one message lists."""


class Skipped:
    """Counts steps that changed nothing, and ends the run after IN_A_ROW of them in a row.

    A float16 run skips steps by design while its loss scale settles; `watching` is then False.
    """

    def __init__(self, ranks: Ranks, watching: bool) -> None:
        self._ranks = ranks
        self._watching = watching
        self.total = 0
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
        lines = []
        for batches, metrics in self._recent:
            if not metrics.skipped and math.isfinite(float(metrics.gradient_norm)):
                self._row = 0
                continue
            self._row += 1
            self.total += 1
            mine = [int(index) for part in batches.ids for index in part]
            samples = sorted({index for theirs in self._ranks.gather(mine) for index in theirs})
            more = ", ..." if len(samples) > _NAMED else ""
            names = ", ".join(map(str, samples[:_NAMED])) + more
            what = f"step {batches.step + 1} skipped: its gradient is not finite"
            lines.append(f"{what} (samples {names})")
            if self._row == IN_A_ROW:
                place = f"steps {batches.step + 2 - IN_A_ROW} to {batches.step + 1}"
                actual = f"no finite gradient {IN_A_ROW} times in a row"
                look = f"Lower the learning rate, or look at the last samples ({names})"
                hint = f"{look}; the last checkpoint is good"
                raise NumericsError(Problem(place, actual, hint=hint)).share()
        self._recent = []
        return lines
