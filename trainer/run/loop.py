"""The training loop, on one page. It depends on types only: any engine, any data, any watcher.

A whole step, with what the engine does (`engines/normalise.py`):

    for micro_batches in loader:                            # this data rank's, on its device
        targets = all_reduce(sum(count(batch) for batch in micro_batches))
        for batch in micro_batches:                         # or a pipeline schedule
            loss = task.loss_sum(model, batch) * data_ranks / targets
            loss.backward()                                 # FSDP or DDP averages over data ranks
        reduce gradients that several ranks hold, over the mesh's other axes
        norm = all_reduce(squares of gradients) ** 0.5; clip
        if norm is finite: optimizer.step(schedule(step))
        log, evaluate, save: each at its own interval; stop if any rank votes for it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.loader import BatchLoader, StepBatches
from trainer.engines.engine import Engine, Metrics
from trainer.optim.lr_schedules import LRSchedule, Update
from trainer.state import RunState
from trainer.supervise.stall import Phase

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoopPlan:
    """The length of a run, and the intervals of events, in steps; None: only at the end."""

    steps: int
    train_batch: int
    log_every: int
    save_every: int | None
    evaluate_every: int | None
    epoch_samples: int | None = None
    """The samples of an epoch; None if the length of the run is not in epochs."""
    epochs: float = 0.0

    def epoch_ended(self, samples: int) -> int | None:
        """Return the number of the epoch, from 1, that ends with the step after which so many
        samples were seen: the last one, if it ends several; None if it ends none.
        """
        if self.epoch_samples is None:
            return None
        whole = math.floor(self.epochs)
        before = min((samples - self.train_batch) // self.epoch_samples, whole)
        number = min(samples // self.epoch_samples, whole)
        return number if number > before else None


class Hooks:
    """The methods that the loop calls; all are collective, at the same steps on all ranks."""

    def log(self, state: RunState, metrics: Metrics, update: Update) -> bool | None:
        """Report a step; return True to end the run. The host may wait for the device here."""

    def epoch(self, step: int, number: int) -> None:
        """Report an epoch, from 1, that ended with a step. The host may wait for the device."""

    def evaluate(self, state: RunState) -> bool:
        """Return True if the run should save and end early, as further training gains nothing."""
        return False

    def save(self, state: RunState) -> None:
        """Save a checkpoint."""

    def on_step(self, batches: StepBatches, metrics: Metrics) -> None:
        """Note a step, each time, without waiting for the device."""

    def stop(self, step: int) -> Callable[[], bool]:
        """Begin to ask, before a step, from 0, if the run must stop; the result is called after."""
        return lambda: False

    def wait(self, step: int) -> bool:
        """Wait for the data of a step, from 0; return True if the run must stop meanwhile."""
        return False

    def at(self, phase: Phase, step: int) -> None:
        """Note that a phase of a step, from 1, begins, so that watchers see where a rank is."""


def train(
    engine: Engine,
    loader: BatchLoader,
    schedule: LRSchedule,
    plan: LoopPlan,
    hooks: Hooks,
    state: RunState,
) -> RunState:
    """Train from `state` to `plan.steps`; return the last state. Only hooks wait for the device."""
    tokens = None
    hooks.at(Phase.WAITING, state.step + 1)
    for batches in loader:
        hooks.at(Phase.TRAINING, batches.step + 1)
        stop = hooks.stop(batches.step)
        update = schedule(batches.step)
        metrics = engine.step(batches.step, batches.micro_batches, update)
        hooks.on_step(batches, metrics)
        tokens = metrics.targets if tokens is None else tokens + metrics.targets
        done = batches.step + 1
        logs = due(done, plan.steps, plan.log_every)
        saves = due(done, plan.steps, plan.save_every)
        evaluates = due(done, plan.steps, plan.evaluate_every)
        stops = stop()
        epoch = plan.epoch_ended(state.samples + (done - state.step) * plan.train_batch)
        if logs or saves or evaluates or stops:
            state = _after(state, done, plan, tokens)
            tokens = None
        if logs or epoch:
            hooks.at(Phase.LOGGING, done)
        if logs:
            stops = hooks.log(state, metrics, update) or stops
        if epoch:
            hooks.epoch(done, epoch)
        if evaluates:
            hooks.at(Phase.EVALUATING, done)
            stops |= hooks.evaluate(state)
        if saves or stops:
            hooks.at(Phase.SAVING, done)
            hooks.save(state)
        if stops:
            break
        hooks.at(Phase.WAITING, done + 1)
        if hooks.wait(done):
            if not saves:
                state = state if tokens is None else _after(state, done, plan, tokens)
                hooks.at(Phase.SAVING, done)
                hooks.save(state)
            break
    return state


def _after(state: RunState, done: int, plan: LoopPlan, tokens: torch.Tensor) -> RunState:
    """Return the state after `done` steps, which waits for the device."""
    samples = state.samples + (done - state.step) * plan.train_batch
    return RunState(done, samples, state.tokens + int(tokens))


def due(step: int, last: int, every: int | None) -> bool:
    return step == last or (every is not None and step % every == 0)
