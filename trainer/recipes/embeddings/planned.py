"""Embeddings as the planner simulates them: without weights, on texts of zeros."""

from __future__ import annotations

import torch

from trainer.config import TrainerSection
from trainer.layout import Layout
from trainer.models.flops import flops_per_token
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel, SampleCost
from trainer.recipes.embeddings.body import (
    body_of,
    check_layout,
    task_of,
    tried_body,
)
from trainer.tasks.task import Batch


def planned_embeddings(section: TrainerSection, layout: Layout) -> PlannedModel:
    """Describe the body that a config names, on texts of its sequence length.

    A sample has an anchor and a positive, and the negatives that the config names. Raises
    ConfigError.
    """
    check_layout(layout)
    options = section.embeddings
    spec = body_of(model_config.read_config(section.model), section, weights=False)
    task = task_of(section, spec, None)
    spec = tried_body(spec, task)
    length = section.data.sequence_length
    columns = max(2 + (options.negatives or 0), len(options.columns))

    def batch(count: int) -> Batch:
        ids = torch.zeros(count, columns, length, dtype=torch.int64)
        ones = torch.ones_like(ids)
        texts = torch.arange(columns * count).reshape(count, columns)
        real = torch.ones(count, dtype=torch.bool)
        known = {"texts": texts, "real": real}
        return {"input_ids": ids, "attention_mask": ones, "pools": ones.clone(), **known}

    def cost(spec: ModelSpec) -> SampleCost:
        flops = flops_per_token(spec, length) * length * columns
        hidden = columns * length * (spec.language.hidden_size or 0)
        kind = f"samples of {columns} texts of {length:,} tokens"
        return SampleCost("pairs", 1, kind, flops, hidden)

    return PlannedModel(spec, lambda spec: task, batch, cost)
