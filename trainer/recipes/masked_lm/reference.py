"""The one process of a masked language model: transformers' own head and loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainer.certify.parameters import Learner
from trainer.certify.recording import Sources
from trainer.certify.tiny_run import Tiny
from trainer.models.spec import ModelSpec
from trainer.recipes.labels.kinds import OfTokens
from trainer.recipes.labels.reference import LabelsReference
from trainer.tasks.task import Sample


class MaskedReference(LabelsReference):
    """One process with the whole tiny model, whose own loss is of the labelled tokens."""

    def __init__(
        self, small: Tiny, spec: ModelSpec, own: Learner, data: Sources, device: torch.device
    ) -> None:
        kind = OfTokens(spec.language.vocabulary)
        super().__init__(small, spec, own, data, kind, device)

    def _samples(self, step: int, data_rank: int) -> list[list[Sample]]:
        """Return the samples of each micro-batch, with the masks of their epoch."""
        layout = self._layout
        shape = layout.accumulation, layout.data_ranks, layout.micro_batch
        places = step * layout.train_batch + np.arange(layout.train_batch).reshape(shape)
        epochs = places[:, data_rank] // len(self._data.training)
        numbers = self._numbers(step, data_rank)
        masked: Any = self._data.training
        return [
            [masked.in_epoch(int(number), int(epoch)) for number, epoch in zip(*part, strict=True)]
            for part in zip(numbers, epochs, strict=True)
        ]
