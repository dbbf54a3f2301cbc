"""The held-out loss of a model, with the task's measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.data.loader import Batching, evaluation_batches
from trainer.data.mixture import Source
from trainer.engines.engine import Engine
from trainer.errors import ConfigError, Problem
from trainer.tasks.supervised import NUMBER
from trainer.tasks.task import Batch, Task
from trainer.trackers import MEASURES, Evaluation

TAKEN = ("step", "loss", "targets")
"""The names under which an evaluation logs its other values."""


class HeldOut(NamedTuple):
    """The result over the targets of held-out samples."""

    loss: float
    """The mean loss, nats per target."""
    targets: int
    measures: dict[str, float]
    """The task's other measures, as shares of the targets."""

    def figures(self) -> dict[str, float]:
        """Return the measures by name; one with a number of its own is the sum over that number."""
        own = dict(self.measures)
        names = [name for name in own if name + NUMBER in own]
        sums = {name: own.pop(name) / (own.pop(name + NUMBER) or math.nan) for name in names}
        return own | sums

    def evaluation(
        self, step: int, by_source: dict[str, float], more: Mapping[str, float]
    ) -> Evaluation:
        """Return the result after `step` steps as trackers get it, with `more` figures by name.

        Figures that no field of `Evaluation` has are its metrics.
        """
        every = self.figures() | dict(more)
        named: dict[str, Any] = {name: every.pop(name) for name in MEASURES if name in every}
        named |= {"by_source": by_source, "metrics": every}
        return Evaluation(step, self.loss, self.targets, **named)


def check_measures(task: Task) -> None:
    """Raise ConfigError for a measure of a task whose name is that of another value."""
    for name in task.measures:
        if name in TAKEN:
            actual = f'{type(task).__name__} has a measure called "{name}"'
            raise ConfigError(Problem("trainer.task", actual, "the name of no other value"))


def held_out_loss(engine: Engine, source: Source, samples: int, workers: int = 0) -> HeldOut:
    """Evaluate the first `samples` samples, loaded by so many processes. Collective."""
    task = engine.job.task
    machine = engine.job.machine
    batching = Batching.of(engine.job.layout, machine.ranks.rank, machine.device, workers)

    def batches() -> Iterator[Batch]:
        for batch in evaluation_batches(source, task.collate, task.blank, batching, samples):
            machine.watch.moves()
            yield batch

    sums, targets = engine.evaluate(batches())
    loss, *measures = (sums / targets).tolist()
    return HeldOut(loss, int(targets), dict(zip(task.measures, measures, strict=True)))


def together(parts: Sequence[HeldOut]) -> HeldOut:
    """Combine several results, weighted by their targets."""
    targets = sum(one.targets for one in parts)

    def mean(values: Iterable[float]) -> float:
        return sum(v * one.targets for v, one in zip(values, parts, strict=True)) / targets

    measures = {name: mean([one.measures[name] for one in parts]) for name in parts[0].measures}
    return HeldOut(mean([one.loss for one in parts]), targets, measures)
