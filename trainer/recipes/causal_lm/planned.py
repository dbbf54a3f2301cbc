"""A causal language model as the planner simulates it: without weights, on tokens of zeros."""

from __future__ import annotations

import torch

from trainer.config import TrainerSection
from trainer.distributed.ranks import ALONE
from trainer.models import huggingface
from trainer.models.finetuning.changed import changed_spec
from trainer.models.flops import flops_per_token
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel, SampleCost
from trainer.recipes.causal_lm.task import CausalLM
from trainer.tasks.task import Batch, Task


def planned_language_model(section: TrainerSection) -> PlannedModel:
    """Describe the language model that a config names. Raises ConfigError."""
    architecture = model_config.read_config(section.model)
    plain = huggingface.spec_of(architecture, section.model, weights=False)
    spec = changed_spec(plain, section, ALONE)  # its task depends on the changes
    length = section.data.sequence_length

    def batch(count: int) -> Batch:
        ids = torch.zeros(count, length, dtype=torch.int64)
        lengths = torch.full((count, 1), length)
        return {"input_ids": ids, "targets": torch.ones_like(ids), "lengths": lengths}

    attention = CausalLM.of(spec, 0).attention()  # tried here, where tensors have values

    def task(spec: ModelSpec) -> Task:
        plain = CausalLM.of(spec, 0, lambda: attention)
        return plain.regularised(spec, section.label_smoothing, section.neftune_alpha)

    def cost(spec: ModelSpec) -> SampleCost:
        flops = flops_per_token(spec, length) * length
        hidden = length * (spec.language.hidden_size or 0)
        return SampleCost("tokens", length, f"samples of {length:,} tokens", flops, hidden)

    return PlannedModel(spec, task, batch, cost)
