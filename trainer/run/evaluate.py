"""The held-out loss of a model, with the task's measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from trainer.data.loader import Batching, evaluation_batches
from trainer.data.mixture import Source
from trainer.engines.engine import Engine
from trainer.tasks.supervised import NUMBER
from trainer.tasks.task import Batch


class HeldOut(NamedTuple):
    """The result over the targets of held-out samples."""

    loss: float
    """The mean loss, nats per target."""
    targets: int
    measures: dict[str, float]
    """The task's other measures, as shares of the targets."""

    def split(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the task's own measures, and a script's metrics: the sums over their numbers."""
        own = dict(self.measures)
        names = [name for name in own if name + NUMBER in own]
        return own, {name: own.pop(name) / (own.pop(name + NUMBER) or math.nan) for name in names}


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
