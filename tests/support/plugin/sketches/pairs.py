"""Two sequences a sample: the model scores both, and the loss compares them (Bradley and Terry)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from sketches.sketch import Body, Made, Sketch, tokens_of
from trainer.certify.pairs import PairsCase, PairsReference
from trainer.data.mixture import Source
from trainer.models.spec import ModelSpec
from trainer.tasks.supervised import Supervised
from trainer.tasks.task import Batch


def samples(count: int) -> Source:
    def pair(index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        chosen, rejected = tokens_of(index), tokens_of(index, stream=1)
        return {"chosen": chosen, "rejected": rejected}, torch.tensor(1.0 + index % 3)

    return Made(count, pair)


def loss(margin: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of -log sigmoid(score of the chosen one - of the other), and the pairs."""
    return -(weight * logsigmoid(margin.float())).sum(), len(weight)


class PairTask(Supervised):
    """One forward pass of both sequences of each pair, which a pipeline's stages can take, too."""

    def output(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return margin_of(self.hidden(model, batch))

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(torch.cat([batch["input.chosen"], batch["input.rejected"]]))  # type: ignore[no-any-return]


def margin_of(scores: torch.Tensor) -> torch.Tensor:
    chosen, rejected = scores[..., 0].chunk(2)
    return chosen - rejected


class PairReference(PairsReference):
    def _output(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        return model(inputs["chosen"])[:, 0] - model(inputs["rejected"])[:, 0]  # type: ignore[no-any-return]


class PairCase(PairsCase):
    reference = PairReference


def task(spec: ModelSpec) -> Supervised:
    return PairTask(loss, spec.build, spec.blocks)


class PairSketch(Sketch):
    build = partial(Body, 1)
    samples = samples
    task = task
    case_kind = PairCase


RECIPE = PairSketch()
