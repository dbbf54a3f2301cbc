"""Distillation as the planner simulates it: a student, and what is known of its teacher."""

from __future__ import annotations

import torch

from trainer.config import TrainerSection
from trainer.models.spec import ModelSpec
from trainer.recipe import PlannedModel
from trainer.recipes.causal_lm.planned import planned_language_model
from trainer.recipes.distillation.task import DistillationTask
from trainer.tasks.task import Batch, Task


def planned_student(section: TrainerSection) -> PlannedModel:
    """Describe the language model that a config names, with a teacher's column. Raises ConfigError.

    No memory is set aside for the teacher, which is gone before the student is built.
    """
    language = planned_language_model(section)
    attention = DistillationTask.of(language.spec, 0).attention()
    keys = section.distillation
    count = keys.top_k

    def batch(samples: int) -> Batch:
        plain = language.batch(samples)
        tokens = plain["input_ids"].numel()
        return plain | {
            "places": torch.arange(tokens).view_as(plain["input_ids"]),
            "teacher_ids": torch.arange(count, dtype=torch.int32).expand(tokens, count),
            "teacher_logs": torch.zeros(tokens, count + 1),
        }

    def task(spec: ModelSpec) -> Task:
        plain = DistillationTask.of(spec, 0, lambda: attention)
        assert isinstance(plain, DistillationTask)
        own = plain.distilling(keys, spec.language.vocabulary)
        return own.regularised(spec, section.label_smoothing, section.neftune_alpha)

    return PlannedModel(language.spec, task, batch, language.cost)
