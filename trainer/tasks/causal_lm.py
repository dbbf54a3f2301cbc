"""Next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.tasks.cross_entropy import IGNORED, LossHead, logits_cross_entropy
from trainer.tasks.task import Batch


class CausalLM:
    """Samples are `input_ids` [n] and `targets` [n], the latter already shifted: targets[t] follows input_ids[t].

    No attention mask is needed: padding stands at the end, where a causal model's real tokens never look.
    """

    def __init__(self, *, fused_head: bool, padding_id: int = 0) -> None:
        self._fused_head = fused_head
        self._padding_id = padding_id

    def prepare(self, model: nn.Module) -> nn.Module:
        """Turn the head of a model on the meta device into one that can return the loss."""
        if self._fused_head:
            head = model.get_output_embeddings()  # type: ignore[operator]
            head.__class__ = LossHead  # the same module, name and hooks; only its forward differs
        return model

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """`input_ids` and `targets`, [batch, longest], int64, padded at the end."""
        longest = max(len(sample["input_ids"]) for sample in samples)
        inputs = np.full((len(samples), longest), self._padding_id, dtype=np.int64)
        targets = np.full((len(samples), longest), IGNORED, dtype=np.int64)
        for row, sample in enumerate(samples):
            inputs[row, : len(sample["input_ids"])] = sample["input_ids"]
            targets[row, : len(sample["targets"])] = sample["targets"]
        return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def shape(self, batch: Batch) -> tuple[int, int]:
        rows, length = batch["input_ids"].shape
        return rows, length

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        longest = max(self.shape(batch)[1] for batch in batches)
        fills = {"input_ids": self._padding_id, "targets": IGNORED}
        return [
            {name: F.pad(value, (0, longest - value.shape[1]), value=fills[name]) for name, value in batch.items()}
            for batch in batches
        ]

    def targets(self, batch: Batch) -> torch.Tensor:
        return (batch["targets"] != IGNORED).sum()

    def below_head(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model.base_model(input_ids=batch["input_ids"], use_cache=False)[0]  # type: ignore[operator,no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if self._fused_head:
            hidden = self.below_head(model, batch)
            return model.get_output_embeddings()(hidden, batch["targets"])  # type: ignore[operator,no-any-return]
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits_cross_entropy(logits, batch["targets"])
