"""The task of a masked language model: the loss of the tokens that are to be predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.distributed.exchange import VocabularyShard, vocabulary_shard_of_head
from trainer.errors import ConfigError, Problem
from trainer.models.language.forward import without_cache
from trainer.models.language.head import ends_in_head
from trainer.models.spec import ModelSpec
from trainer.recipes.labels.kinds import Labelled, OfTokens
from trainer.recipes.labels.task import LabelTask
from trainer.tasks.losses.cross_entropy import (
    NO_OPTIONS,
    LossHead,
    LossOptions,
    count_correct,
    logits_cross_entropy,
)
from trainer.tasks.task import IGNORED, Batch, changed


class MaskedHead(LossHead):
    """An output head that, given places, returns the loss of the tokens there, and no others."""

    def __init__(self, head: nn.Linear, options: LossOptions) -> None:
        super().__init__(head, options)
        self._places: torch.Tensor | None = None

    @contextmanager
    def at(self, places: torch.Tensor, targets: torch.Tensor) -> Iterator[None]:
        """Return the loss at places [n, 2], row and column, to a caller that passes hidden states.

        `targets` [n].
        """
        self._places = places
        try:
            with self.given(targets):
                yield
        finally:
            self._places = None

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._places is not None:
            hidden = chosen(hidden, self._places)
        return super().forward(hidden, targets)


class MaskedTask(LabelTask):
    """The task of samples whose labels are the tokens that are to be predicted.

    The head computes logits at those places alone, a chunk at a time, if the model's logits are
    those of its last linear layer. Else all logits of a micro-batch exist at once.
    """

    kind: OfTokens

    def __init__(self, spec: ModelSpec, padding: int) -> None:
        model = spec.build()
        kind = OfTokens(spec.language.vocabulary)
        super().__init__(kind, padding, spec.language.hidden_size, without_cache(model))

    def regularised(
        self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float
    ) -> MaskedTask:
        if neftune_alpha:
            actual = f"saw {neftune_alpha:g}, and masked tokens"
            raise ConfigError(Problem("trainer.neftune_alpha", actual, "0 for the task masked_lm"))
        return changed(self, _smoothing=label_smoothing)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Put a head that can return the loss in the place of the model's own."""
        if ends_in_head(model):  # type: ignore[arg-type]
            own: Any = head_of(model)
            head = MaskedHead(own, LossOptions(self._smoothing))
            modules = model.named_modules(remove_duplicate=False)
            for name in [name for name, module in modules if module is own]:
                model.set_submodule(name, head)
        return model

    def collate(self, samples: Sequence[Labelled]) -> Batch:
        """Pad samples to `input_ids` and `labels`, [rows, longest], int64.

        `places` [n, 2] are the row and the column of each target, whose number is known here and
        not on a device. Rows of one length have no `attention_mask`.
        """
        batch = super().collate(samples)
        if len({len(sample["input_ids"]) for sample in samples}) == 1:
            batch.pop("attention_mask")
        places = [
            (row, column)
            for row, sample in enumerate(samples)
            if "blank" not in sample
            for column in np.flatnonzero(sample["labels"] != IGNORED).tolist()
        ]
        return batch | {"places": torch.from_numpy(np.array(places, np.int64).reshape(-1, 2))}

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        lengths = {batch["input_ids"].shape[1] for batch in batches}
        if len(lengths) > 1:
            ones = [torch.ones_like(batch["input_ids"]) for batch in batches]
            pairs = zip(batches, ones, strict=True)
            batches = [{"attention_mask": one, **batch} for batch, one in pairs]
        return super().padded(batches)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if isinstance(head := head_of(model), MaskedHead):
            return self._fused_loss(model, head, batch)
        smoothing = self._smoothing if model.training else 0.0
        return self._loss(model, self._at_places(model, batch), batch, LossOptions(smoothing))

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss, and the number of targets with the highest logit."""
        if isinstance(head := head_of(model), MaskedHead):
            loss = self._fused_loss(model, head, batch)
            return torch.stack([loss, head.take_correct()])
        logits = self._at_places(model, batch)
        targets = chosen(batch["labels"], batch["places"])
        correct = count_correct(logits, targets, self._shard(model))
        return torch.stack([self._loss(model, logits, batch, NO_OPTIONS), correct])

    def _fused_loss(self, model: nn.Module, head: MaskedHead, batch: Batch) -> torch.Tensor:
        """Have the model's own head return the loss in place of logits."""
        places = batch["places"]
        with head.at(places, chosen(batch["labels"], places)):
            return self.logits(model, batch)

    def _at_places(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return chosen(self.logits(model, batch), batch["places"])

    def _loss(
        self, model: nn.Module, logits: torch.Tensor, batch: Batch, options: LossOptions
    ) -> torch.Tensor:
        targets = chosen(batch["labels"], batch["places"])
        return logits_cross_entropy(logits, targets, options, self._shard(model))

    def _shard(self, model: nn.Module) -> VocabularyShard | None:
        head = head_of(model)
        return None if head is None else vocabulary_shard_of_head(head)


def head_of(model: nn.Module) -> nn.Module | None:
    return model.get_output_embeddings()  # type: ignore[operator]


def chosen(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the values [rows, columns, ...] at places [n, 2]: [n, ...]."""
    flat = places[:, 0] * values.shape[1] + places[:, 1]
    return values.flatten(0, 1).index_select(0, flat)
