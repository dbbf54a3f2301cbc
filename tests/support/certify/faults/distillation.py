"""Faults of distillation: of the teacher's column, its loss and its sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.certify.faults.planting import around


def column_of_another_sample(engine: str) -> Any:
    """Each sample's targets get what is known at the next targets of the data."""
    from trainer.recipes.distillation.column import TeacherColumn

    def moved(real: Any, self: Any, starts: Any, ids: Any, logs: Any) -> None:
        real(self, starts, np.roll(ids, 1, 0), np.roll(logs, 1, 0))

    return around(TeacherColumn, "__init__", moved)


def dropout_in_the_teacher(engine: str) -> Any:
    from trainer.recipes.distillation.task import DistillationTask

    def measured(real: Any, self: Any, model: Any, batch: Any) -> Any:
        model.train()
        result = real(self, model, batch)
        model.eval()
        return result

    return around(DistillationTask, "_measured_column", measured)


def a_prompt_token_counted(engine: str) -> Any:
    """The token before the first target of each document counts, and has its teacher's row."""
    from trainer.recipes.distillation.task import DistillationTask

    def collated(real: Any, self: Any, samples: Any) -> Any:
        batch = real(self, samples)
        targets = batch["targets"]
        for row, target in enumerate(targets):
            first = int((target >= 0).nonzero()[0]) if bool((target >= 0).any()) else 0
            if first and "teacher_ids" in batch:
                target[first - 1] = batch["input_ids"][row, first]
                batch["places"][row, first - 1] = batch["places"][row, first]
        return batch

    return around(DistillationTask, "collate", collated)


def square_of_the_temperature_missing(engine: str) -> Any:
    from trainer.tasks.losses import divergences

    def chunk(real: Any, logits: Any, targets: Any, teacher: Any, call: Any) -> Any:
        each, grad = real(logits, targets, teacher, call)
        square = call.mixed.temperature**2
        return each / square, grad / square

    return around(divergences, "_chunk", chunk)


def a_mean_of_micro_batches(engine: str) -> Any:
    """Each micro-batch's loss is its own mean, times the mean number of targets."""
    from trainer.recipes.distillation.task import DistillationTask

    def noted(real: Any, self: Any, sums: Any, trains: bool, batch: Any) -> Any:
        loss = real(self, sums, trains, batch)
        return loss / self.targets(batch).clamp_min(1) * 8.0 if trains else loss

    return around(DistillationTask, "_noted", noted)


def _alone(module: Any, name: str, *lost: str) -> Any:
    from trainer.distributed.exchange import Exchange

    class Alone(Exchange):
        pass

    def copied(self: Any, whole: Any) -> Any:
        return whole

    def gathered(self: Any, part: Any, dim: int, length: int) -> Any:
        return part.repeat_interleave(length, dim)

    for method in lost:
        setattr(Alone, method, copied if method == "copy_to" else gathered)

    def alone(real: Any, weight: Any) -> Any:
        shard = real(weight)
        return shard and replace(shard, ranks=Alone(shard.ranks.group))

    return around(module, name, alone)


def gradient_of_other_words_missing(engine: str) -> Any:
    from trainer.tasks.losses import divergences

    return _alone(divergences, "vocabulary_shard_of", "copy_to")


def words_of_other_ranks_not_summed(engine: str) -> Any:
    from trainer.tasks.losses import divergences

    return _alone(divergences, "vocabulary_shard_of", "gather")


def likeliest_of_one_rank(engine: str) -> Any:
    """The teacher's likeliest tokens are those of the first half of its vocabulary."""
    from trainer.recipes.distillation import task

    def halved(real: Any, hidden: Any, weight: Any, bias: Any, count: int, ids: int, t: Any) -> Any:
        return real(hidden, weight, bias, count, max(count, ids // 2), t)

    return around(task, "linear_likeliest", halved)


def places_of_another_part(engine: str) -> Any:
    """Each rank that shares a sequence looks up the teacher of another's tokens."""
    from trainer.recipes.distillation.task import NOWHERE, DistillationTask

    def own(real: Any, self: Any, batch: Any) -> Any:
        ranks = self._context
        if not ranks or self._column:
            return real(self, batch)
        other = (ranks.rank + 1) % ranks.division.size
        return ranks.division.part(batch["places"], other, fill=NOWHERE).flatten()

    return around(DistillationTask, "_own_places", own)
