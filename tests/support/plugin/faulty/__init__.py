"""Recipes with a mistake each, which an error names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from sketches.body import HeadSketch
from sketches.sketch import Body
from torch import nn

from trainer.config import TrainerSection
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.plugins import register
from trainer.recipe import PlannedModel, RunContext, Subject
from trainer.tasks.supervised import Supervised
from trainer.tasks.task import Batch


def loss_and_half(self: Supervised, model: nn.Module, batch: Batch):  # type: ignore[no-untyped-def]
    total = self.loss_sum(model, batch)
    return total.new_tensor([float(total), float(batch["count"]) / 2])


class Measuring(Supervised):
    """Each evaluation finds half of the targets "ordered"."""

    measures = ("ordered",)
    measured = loss_and_half


class Taken(Measuring):
    measures = ("targets",)


def of_kind(kind: type[Supervised]) -> object:
    def task(spec: ModelSpec) -> Supervised:
        plain = HeadSketch.task(spec)
        return kind(plain._loss, spec.build, spec.blocks)

    return type(kind.__name__, (HeadSketch,), {"task": task})()


register("recipe", "faulty:measuring")(of_kind(Measuring))
register("recipe", "faulty:taken")(of_kind(Taken))


class Raising(HeadSketch):
    def subject(self, context: RunContext) -> Subject:
        raise KeyError("my own file is missing")


class Unplanned(HeadSketch):
    planned = None  # type: ignore[assignment]


class Stories(HeadSketch):
    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        planned = super().planned(section, layout)
        return planned._replace(cost=lambda spec: replace(planned.cost(spec), unit="stories"))


class WritesAfterItsBlocks(Body):
    """What follows the blocks, a slice, runs on each stage of a pipeline."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden[:, -1])  # type: ignore[no-any-return]


class Sliced(HeadSketch):
    build = partial(WritesAfterItsBlocks, 3)
    blocks = "blocks.*"


register("recipe", "faulty:stories")(Stories())
register("recipe", "faulty:raising")(Raising())
register("recipe", "faulty:unplanned")(Unplanned())
register("recipe", "faulty:kind")(HeadSketch)
register("recipe", "faulty:sliced")(Sliced())
