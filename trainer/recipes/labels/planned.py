"""A model with a head for labels as the planner simulates it: without weights, on ones."""

from __future__ import annotations

import torch

from trainer.config import TrainerSection
from trainer.distributed.ranks import ALONE
from trainer.models.finetuning.changed import changed_spec
from trainer.models.flops import flops_per_token
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel, SampleCost
from trainer.recipes.labels.kinds import Labelled
from trainer.recipes.labels.model import labelled_config, spec_of, task_of, with_trained_head
from trainer.recipes.labels.subject import kind_of
from trainer.tasks.task import Batch, Task


def planned_labels(section: TrainerSection) -> PlannedModel:
    """Describe the model that a config names, on samples of the longest length. Raises ConfigError.

    Without the data, the number of classes is that of trainer.labels.names, or 2.
    """
    architecture = model_config.read_config(section.model)
    name = "single" if section.labels.kind == "auto" else section.labels.kind
    classes = len(section.labels.names) or (1 if name in ("regression", "reward") else 2)
    kind = kind_of(name, classes, section, [])
    padding = architecture.get_text_config().pad_token_id
    labelled_config(architecture, kind, section.labels.names, padding or 0)
    plain = spec_of(architecture, section.model, kind, weights=False)
    spec = changed_spec(plain, with_trained_head(section, plain), ALONE)
    length = section.data.sequence_length
    rows = 2 if name == "reward" else 1
    ids = torch.ones(length, dtype=torch.int64).numpy()
    labels = {"tokens": ids * 0, "single": 0}.get(name, [0.0] * classes)
    sample: Labelled = {"input_ids": ids, "labels": labels}
    if name == "reward":
        sample = {"chosen": ids, "rejected": ids, "margin": 0.0}
    labelling = task_of(spec, kind)

    def batch(count: int) -> Batch:
        return labelling.collate([sample] * count)

    def task(spec: ModelSpec) -> Task:
        return labelling.regularised(spec, section.label_smoothing, section.neftune_alpha)

    def cost(spec: ModelSpec) -> SampleCost:
        tokens = rows * length
        words = f"samples of {'2 x ' if rows > 1 else ''}{length:,} tokens"
        hidden = tokens * (spec.language.hidden_size or 0)
        return SampleCost("tokens", tokens, words, flops_per_token(spec, length) * tokens, hidden)

    return PlannedModel(spec, task, batch, cost)
