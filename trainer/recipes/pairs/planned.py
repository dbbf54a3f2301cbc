"""Pairs as the planner simulates them: a language model on two sequences a sample."""

from __future__ import annotations

import torch

from trainer.config import TrainerSection
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel, SampleCost
from trainer.recipes.causal_lm.planned import planned_language_model
from trainer.recipes.pairs.losses import LOSSES
from trainer.recipes.pairs.task import PairsTask
from trainer.tasks.task import Batch, Task


def planned_pairs(section: TrainerSection) -> PlannedModel:
    """Describe the language model that a config names, on pairs. Raises ConfigError.

    No memory is set aside for a reference: it is a column of the samples.
    """
    language = planned_language_model(section)
    attention = PairsTask.of(language.spec, 0).attention()
    has_reference = LOSSES[section.pairs.loss].has_reference
    length = section.data.sequence_length

    def batch(count: int) -> Batch:
        column = {"reference": torch.zeros(count, 2, dtype=torch.float64)} if has_reference else {}
        tokens = language.batch(2 * count)
        places = torch.arange(2 * count * length)
        scored = torch.stack([places // length, places % length], 1)
        return tokens | {"scored": scored, "margins": torch.zeros(count)} | column

    def task(spec: ModelSpec) -> Task:
        plain = PairsTask.of(spec, 0, lambda: attention)
        assert isinstance(plain, PairsTask)
        return plain.comparing(section.pairs).regularised(
            spec, section.label_smoothing, section.neftune_alpha
        )

    def cost(spec: ModelSpec) -> SampleCost:
        one = language.cost(spec)
        kind = f"pairs of {length:,} tokens each"
        return SampleCost("tokens", 2 * length, kind, 2 * one.flops, one.hidden)

    return PlannedModel(language.spec, task, batch, cost)
