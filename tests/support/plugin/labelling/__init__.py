"""A recipe in a package of its own: a label for each token of made-up sequences.

Its certificate and its plan come with it, and nothing in `trainer` knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from labelling.model import Tagger, tensor_plan
from labelling.samples import Labelled
from labelling.task import Labelling
from trainer.config import TrainerSection
from trainer.data.dataset import Pairs, pairs_of
from trainer.engines import Machine
from trainer.layout import Layout
from trainer.models.own import module
from trainer.models.spec import LanguageModel, ModelSpec
from trainer.recipe import (
    HandedIn,
    PlannedModel,
    RunContext,
    SampleCost,
    Subject,
)
from trainer.tasks.sample_cost import flops_of_sample
from trainer.tasks.task import Batch

if TYPE_CHECKING:
    from trainer.certify.pairs import PairsCase
    from trainer.certify.tiny_run import Tiny


class Options(BaseModel):
    """The keys of `trainer.recipe`."""

    model_config = ConfigDict(extra="forbid")

    labels: int = Field(5, ge=2)
    width: int = Field(16, ge=4)
    blocks: int = Field(3, ge=1)
    length: int = Field(12, ge=2)
    """The tokens of a sequence, of which the last ones may be padding."""
    samples: int = Field(64, ge=1)

    def build(self) -> nn.Module:
        return Tagger(self.labels, self.width, self.blocks, self.length)


class SequenceLabelling:
    """The recipe: a tagger, made-up sequences, and cross entropy over the labelled tokens."""

    keys = ("trainer.data.sequence_length", "trainer.data.evaluation_fraction")
    options = Options

    def subject(self, context: RunContext) -> Subject:
        options = options_of(context.section)
        samples = Labelled(options.samples, options.length, options.labels)
        data = pairs_of(samples, None, context.section.data.evaluation_fraction)
        spec = spec_of(options, context.section.seed)
        task = Labelling(spec.build, spec.blocks)
        tried = spec.tried_on(task.trial(context.first_samples(data.train)))
        return Subject(tried, task, data)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        options = options_of(section)
        spec = spec_of(options, section.seed)
        task = Labelling(spec.build, spec.blocks)
        samples = Labelled(64, options.length, options.labels)
        spec = spec.tried_on(task.trial([samples[0], samples[1]]))

        def batch(count: int) -> Batch:
            return task.collate([samples[number % 64] for number in range(count)])

        def cost(spec: ModelSpec) -> SampleCost:
            flops = flops_of_sample(spec, task, batch)
            kind = f"sequences of {options.length} tokens"
            hidden = options.length * options.width
            return SampleCost("labels", options.length, kind, flops, hidden)

        return PlannedModel(spec, lambda spec: task, batch, cost)

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> PairsCase:
        from trainer.certify.pairs import PairsCase
        from trainer.certify.parameters import constructed

        options = options_of(small.config.trainer)
        spec = spec_of(options, small.config.trainer.seed)
        task = Labelling(spec.build, spec.blocks)
        count = small.layout.train_batch * 3 // 2 + small.held_out + 3
        samples = Labelled(count, options.length, options.labels)
        tried = spec.tried_on(task.trial([samples[number] for number in range(4)]))
        subject = Subject(tried, task, Pairs(samples, None, ""))
        build: Callable[..., nn.Module] = partial(constructed, options.build)
        return PairsCase(small, subject, build, task.loss, tops=(1,))


def options_of(section: TrainerSection) -> Options:
    """Return the recipe's keys; the default length is the config's."""
    return Options(**{"length": min(12, section.data.sequence_length), **section.recipe})


def spec_of(options: Options, seed: int) -> ModelSpec:
    """Describe the tagger: its blocks, and how tensor ranks split them."""
    spec = module.spec_of(options.build, "blocks.*", seed)
    plan = tensor_plan(options.blocks)
    return replace(spec, language=LanguageModel(tensor_plan=plan, hidden_size=options.width))


RECIPE = SequenceLabelling()
