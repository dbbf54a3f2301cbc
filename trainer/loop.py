"""The loop, on one page. Knows types only: any engine, any data, anything that watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.data.feed import Feed, StepBatches
from trainer.engines.engine import Engine, Metrics
from trainer.optimizers import Schedule, Update
from trainer.state import RunState


@dataclass(frozen=True)
class Plan:
    """How long, and what happens when. Counts are optimizer steps; None: only at the end."""

    steps: int
    train_batch: int
    log_every: int
    save_every: int | None
    evaluate_every: int | None


@dataclass(frozen=True)
class Hooks:
    """What the loop calls. All are collective: every rank calls them at the same steps."""

    log: Callable[[RunState, Metrics, Update], None]
    evaluate: Callable[[RunState], None]
    save: Callable[[RunState], None]
    seen: Callable[[StepBatches, Metrics], None] = lambda batches, metrics: None
    """Told each step, without a wait for the device."""
    stop: Callable[[], Callable[[], bool]] = lambda: lambda: False
    """Begins to ask, before each step, whether to save and leave early; what it returns is called after the step."""


def train(engine: Engine, feed: Feed, schedule: Schedule, plan: Plan, hooks: Hooks, state: RunState) -> RunState:
    """Train from `state` to `plan.steps`; returns the last state. The only host synchronisation is in the hooks."""
    tokens = None
    for batches in feed:
        asked = hooks.stop()
        update = schedule(batches.step)
        metrics = engine.step(batches.step, batches.micro_batches, update)
        hooks.seen(batches, metrics)
        tokens = metrics.targets if tokens is None else tokens + metrics.targets
        done = batches.step + 1
        logs, saves = due(done, plan.steps, plan.log_every), due(done, plan.steps, plan.save_every)
        stops = asked()
        if logs or saves or stops:
            state = RunState(done, state.samples + (done - state.step) * plan.train_batch, state.tokens + int(tokens))
            tokens = None
        if logs:
            hooks.log(state, metrics, update)
        if due(done, plan.steps, plan.evaluate_every):
            hooks.evaluate(state)
        if saves or stops:
            hooks.save(state)
        if stops:
            break
    return state


def due(step: int, last: int, every: int | None) -> bool:
    return step == last or (every is not None and step % every == 0)
