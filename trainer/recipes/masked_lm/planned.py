"""A masked language model as the planner simulates it: without weights, on ones."""

from __future__ import annotations

import numpy as np

from trainer.config import TrainerSection
from trainer.distributed.ranks import ALONE
from trainer.layout import Layout
from trainer.models.finetuning.changed import changed_spec
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel, SampleCost
from trainer.recipes.masked_lm.model import check_layout, flops_of, spec_of
from trainer.recipes.masked_lm.task import MaskedTask
from trainer.tasks.task import IGNORED, Batch, Task


def planned_masked(section: TrainerSection, layout: Layout) -> PlannedModel:
    """Describe the model that a config names, on samples of the longest length. Raises ConfigError.

    Each has the mean number of targets.
    """
    check_layout(layout)
    architecture = model_config.read_config(section.model)
    spec = changed_spec(spec_of(architecture, section.model, weights=False), section, ALONE)
    length = section.data.sequence_length
    targets = max(1, round(length * section.masked.probability))
    ids = np.ones(length, np.int64)
    labels = np.where(np.arange(length) < targets, ids, IGNORED)
    plain = MaskedTask(spec, 0)

    def batch(count: int) -> Batch:
        return plain.collate([{"input_ids": ids, "labels": labels}] * count)

    def task(spec: ModelSpec) -> Task:
        return plain.regularised(spec, section.label_smoothing, section.neftune_alpha)

    def cost(spec: ModelSpec) -> SampleCost:
        flops = flops_of(spec, section.masked, length) * length
        hidden = length * (spec.language.hidden_size or 0)
        return SampleCost("tokens", length, f"samples of {length:,} tokens", flops, hidden)

    return PlannedModel(spec, task, batch, cost)
