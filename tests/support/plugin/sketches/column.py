"""A column of the samples: the scores of the model as it was before training, by the same layout.

The loss compares each score with the reference's, as preference losses do with a frozen copy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from sketches.sketch import Body, Made, Sketch, tokens_of
from trainer.data.dataset import Pairs, Subset
from trainer.data.loader import Batching, evaluation_batches
from trainer.data.mixture import Source
from trainer.engines import Engine
from trainer.models.spec import ModelSpec
from trainer.recipe import RunContext, Subject
from trainer.tasks.supervised import Supervised
from trainer.tasks.task import Batch

CHUNK = 16
FILE = "reference.json"


def samples(count: int) -> Source:
    def sample(index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"tokens": tokens_of(index)}, torch.tensor(1.0)

    return Numbered(Made(count, sample), [0.0] * count)


class Numbered:
    """Samples with their number in a chunk, and the reference's score."""

    def __init__(self, source: Source, column: list[float]) -> None:
        self._source = source
        self._column = column

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        given, target = self._source[index]
        number = torch.tensor(index % CHUNK)
        return {**given, "number": number}, torch.tensor(self._column[index])


def loss(scores: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of -log sigmoid(score - reference), and the samples."""
    return -logsigmoid(scores.float() - reference.float()).sum(), len(reference)


class ColumnTask(Supervised):
    """Its measures are the scores of a chunk's samples, each counted once over all ranks."""

    measures = tuple(f"score_{number}" for number in range(CHUNK))

    def output(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.hidden(model, batch)[:, 0]

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["input.tokens"])  # type: ignore[no-any-return]

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        scores = self.output(model, batch).float()
        total = loss(scores, batch["target"])[0]
        column = scores.new_zeros(CHUNK).index_add(0, batch["input.number"], scores)
        return torch.cat([total[None], column]) * batch["share"]


@dataclass(frozen=True)
class ColumnSubject(Subject):
    data: Pairs

    def before_training(self, engine: Engine, folder: Path, step: int) -> Subject:
        ranks, path = engine.job.machine.ranks, folder / FILE
        if not ranks.on_first(path.exists):
            column = self.computed(engine)
            ranks.on_first(lambda: path.write_text(json.dumps(column)))
        column = ranks.on_first(lambda: json.loads(path.read_text()))
        return replace(self, data=replace(self.data, train=Numbered(self.data.train, column)))

    def computed(self, engine: Engine) -> list[float]:
        """Return the score of each training sample, by chunks. Collective."""
        job = engine.job
        plain = Numbered(self.data.train, [0.0] * len(self.data.train))
        batching = Batching.of(job.layout, job.machine.ranks.rank, job.machine.device)
        column: list[float] = []
        for start in range(0, len(plain), CHUNK):
            chunk = Subset(plain, range(start, min(start + CHUNK, len(plain))))
            batches = evaluation_batches(chunk, job.task.collate, job.task.blank, batching, None)
            sums, _ = engine.evaluate(batches)
            column += sums[1 : 1 + len(chunk)].tolist()
        return column


def task(spec: ModelSpec) -> Supervised:
    return ColumnTask(loss, spec.build, spec.blocks)


class ColumnSketch(Sketch):
    build = partial(Body, 1)
    samples = samples
    task = task

    def subject(self, context: RunContext) -> Subject:
        plain = super().subject(context)
        assert isinstance(plain.data, Pairs)
        data = replace(plain.data, evaluation=None)
        return ColumnSubject(plain.spec, plain.task, data)


RECIPE = ColumnSketch()
