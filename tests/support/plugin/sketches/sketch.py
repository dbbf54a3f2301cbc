"""What the sketches share: a recipe of a module, a data set and a task, each built by a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from trainer.certify.pairs import PairsCase
from trainer.certify.parameters import constructed
from trainer.certify.tiny_run import Tiny
from trainer.config import TrainerSection
from trainer.data.dataset import Pairs, pairs_of
from trainer.data.mixture import Source
from trainer.engines import Machine
from trainer.layout import Layout
from trainer.models.own import module
from trainer.models.spec import ModelSpec
from trainer.recipe import HandedIn, PlannedModel, RunContext, SampleCost, Subject
from trainer.tasks.supervised import Supervised
from trainer.tasks.task import Batch

WORDS, LENGTH = 29, 6


def tokens_of(index: int, stream: int = 0) -> torch.Tensor:
    """Draw the tokens of a sample, [LENGTH]."""
    generator = torch.Generator().manual_seed(1000 * stream + index)
    return torch.randint(1, WORDS, (LENGTH,), generator=generator)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh())
        self.outer = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
        mixed = hidden.cumsum(1) / places[None, :, None]
        return hidden + self.outer(self.inner(self.norm(mixed)))  # type: ignore[no-any-return]


class Last(nn.Module):
    """The last token's hidden state, by a module, which stages of a pipeline but the last leave out."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, -1]


class Body(nn.Module):
    """A table and blocks, and a head that gives `outputs` numbers of the last hidden state."""

    def __init__(self, outputs: int, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.last = Last()
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [batch, outputs] of tokens [batch, sequence]."""
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.last(hidden))  # type: ignore[no-any-return]


class Sketch:
    """A recipe whose parts are functions."""

    keys: ClassVar[tuple[str, ...]] = ()
    build: Callable[[], nn.Module]
    samples: Callable[[int], Source]
    task: Callable[[ModelSpec], Supervised]
    case_kind: type[PairsCase] = PairsCase
    blocks = "blocks.*"

    def subject(self, context: RunContext) -> Subject:
        data = pairs_of(type(self).samples(48), None, 0.25)
        spec, task = self.tried(context.section, context.first_samples(data.train))
        return Subject(spec, task, data)

    def tried(self, section: TrainerSection, first: list[object]) -> tuple[ModelSpec, Supervised]:
        spec = module.spec_of(type(self).build, self.blocks, section.seed)
        task = type(self).task(spec)
        return spec.tried_on(task.trial(first)), task

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        samples = type(self).samples(4)
        spec, task = self.tried(section, [samples[number] for number in range(4)])

        def batch(count: int) -> Batch:
            return task.collate([samples[number % 4] for number in range(count)])

        cost = SampleCost("samples", 1, "sketches", 1.0, 0)
        return PlannedModel(spec, lambda spec: task, batch, lambda spec: cost)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> PairsCase:
        count = small.layout.train_batch * 3 // 2 + small.held_out + 3
        samples = type(self).samples(count)
        first = [samples[number] for number in range(4)]
        spec, task = self.tried(small.config.trainer, first)
        subject = Subject(spec, task, Pairs(samples, None, ""))
        build: Callable[..., nn.Module] = partial(constructed, type(self).build)
        return self.case_kind(small, subject, build, task._loss)


class Made:
    """A data set of made-up samples."""

    def __init__(self, count: int, make: Callable[[int], object]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> object:
        return self._make(index)
