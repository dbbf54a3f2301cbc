"""A loss over the samples of all data ranks: each query is to find its own key among them all."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.functional import cross_entropy, normalize

from sketches.sketch import Body, Made, Sketch, tokens_of
from trainer.certify.one_process.expected import Judged, MicroBatch
from trainer.certify.pairs import PairsCase, PairsReference
from trainer.certify.recording import State
from trainer.data.mixture import Source
from trainer.distributed.context_ranks import ContextRanks
from trainer.models.spec import ModelSpec
from trainer.tasks.supervised import Supervised
from trainer.tasks.task import Batch

WIDTH, SCALE = 5, 4.0


def samples(count: int) -> Source:
    def pair(index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        query, key = tokens_of(index), tokens_of(index, stream=1)
        return {"query": query, "key": key}, torch.tensor(0)

    return Made(count, pair)


def loss(vectors: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return InfoNCE of vectors [2 x pairs, width], queries before keys, of one rank alone."""
    queries, keys = normalize(vectors.float(), dim=-1).chunk(2)
    wanted = torch.arange(len(keys), device=keys.device)
    return cross_entropy(SCALE * queries @ keys.T, wanted, reduction="sum"), len(keys)


class ContrastTask(Supervised):
    _group: dist.ProcessGroup | None = None

    def placed(self, context: ContextRanks | None, batch: dist.ProcessGroup | None = None) -> None:
        self._group = batch

    def output(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(torch.cat([batch["input.query"], batch["input.key"]]))  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of this rank's queries among the keys of all data ranks."""
        vectors = normalize(self.output(model, batch).float(), dim=-1)
        queries, keys = vectors.chunk(2)
        first = 0
        if self._group is not None and model.training:
            first = dist.get_rank(self._group) * len(keys)
            keys = all_gather_tensor_autograd(keys.contiguous(), 0, self._group)
        wanted = first + torch.arange(len(queries), device=keys.device)
        total = cross_entropy(SCALE * queries @ keys.T, wanted, reduction="sum")
        return total * batch["share"]


class ContrastReference(PairsReference):
    """One process, in which the micro-batches that data ranks run together are one."""

    listens = False

    def _output(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        return model(torch.cat([inputs["query"], inputs["key"]]))  # type: ignore[no-any-return]

    def whole_step(self, step: int) -> list[MicroBatch]:
        by_rank = [self._samples(step, rank) for rank in range(self._layout.data_ranks)]
        results = []
        for number, parts in enumerate(zip(*by_rank, strict=True)):
            together = [sample for part in parts for sample in part]
            results.append(MicroBatch(0, number, *self._collated(together)))
        return results

    def held_out(self, state: State) -> Judged:
        """Evaluate as the task does, within a micro-batch."""
        self._load(state)
        return self._judged(self._evaluated_samples(), self._layout.micro_batch)


class ContrastCase(PairsCase):
    reference = ContrastReference


def task(spec: ModelSpec) -> Supervised:
    return ContrastTask(loss, spec.build, spec.blocks)


class ContrastSketch(Sketch):
    build = partial(Body, WIDTH)
    samples = samples
    task = task
    case_kind = ContrastCase


RECIPE = ContrastSketch()


class AloneTask(ContrastTask):
    """The planted fault: it compares with the samples of its own rank alone."""

    def placed(self, context: ContextRanks | None, batch: dist.ProcessGroup | None = None) -> None:
        self._group = None


def alone_task(spec: ModelSpec) -> Supervised:
    return AloneTask(loss, spec.build, spec.blocks)


class AloneSketch(ContrastSketch):
    task = alone_task


ALONE = AloneSketch()
