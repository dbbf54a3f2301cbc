"""The task of a model with a head for labels: its micro-batches, and the sum of its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.distributed.context_ranks import ContextRanks
from trainer.errors import ConfigError, Problem
from trainer.models.spec import ModelSpec, Trial
from trainer.recipes.labels.kinds import LabelKind, Labelled
from trainer.tasks.task import IGNORED, Batch, WholeStep, changed


class LabelTask:
    """The task of samples that are sequences of tokens with labels of one kind.

    Rows are padded at their end, with the token by which the model's own head knows padding.
    """

    draws: bool = False
    whole_step: WholeStep | None = None

    def __init__(
        self, kind: LabelKind, padding: int, hidden_size: int | None, options: Mapping[str, object]
    ) -> None:
        """`options`: arguments of the model's forward that are the same in each."""
        self.kind = kind
        self.measures: tuple[str, ...] = ("accuracy",) if kind.scored else ()
        self._padding = padding
        self._hidden_size = hidden_size
        self._options = options
        self._smoothing = 0.0
        self._sums = False

    def measuring(self) -> LabelTask:
        """Return the same task, which takes the sums of all metrics of its kind."""
        return changed(self, measures=self.kind.measures, _sums=True)

    def regularised(
        self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float
    ) -> LabelTask:
        """Return the same task with smoothed labels.

        Raises ConfigError for labels that are no classes, and for noise on embeddings.
        """
        if neftune_alpha:
            actual = f"saw {neftune_alpha:g}, and labels"
            raise ConfigError(Problem("trainer.neftune_alpha", actual, "0 for the task labels"))
        if label_smoothing and not self.kind.smooths:
            actual = f"saw {label_smoothing:g}, and labels of the kind {self.kind.name}"
            expected = "0, or one class for each target"
            raise ConfigError(Problem("trainer.label_smoothing", actual, expected))
        return changed(self, _smoothing=label_smoothing)

    def placed(self, context: ContextRanks | None, batch: dist.ProcessGroup | None = None) -> None:
        """Take no note of them: each loss is of its own samples, and no sequence is divided."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def collate(self, samples: Sequence[Labelled]) -> Batch:
        """Pad samples to `input_ids` and `attention_mask`, [rows, longest], int64, with labels.

        A pair of answers is two rows, the better one first.
        """
        rows = [row for sample in samples for row in self.kind.sequences(sample)]
        width = max(map(len, rows))
        batch = {
            "input_ids": _stacked(rows, width, self._padding),
            "attention_mask": _stacked([np.ones(len(row), np.int64) for row in rows], width, 0),
        }
        if "token_type_ids" in samples[0]:
            types = [sample["token_type_ids"] for sample in samples]
            batch["token_type_ids"] = _stacked(types, width, 0)
        batch |= self.kind.collated(samples, width)
        return {**batch, "count": self.kind.targets(batch)}

    def blank(self, sample: Labelled) -> Labelled:
        return {**sample, "blank": True}

    def shape(self, batch: Batch) -> tuple[int, int]:
        """Return [rows, sequence]."""
        rows, length = batch["input_ids"].shape
        return rows, length

    def hidden_shape(self, batch: Batch, block: int) -> tuple[int, ...]:
        """Return [rows, sequence, hidden size], which is the same for every block."""
        assert self._hidden_size is not None
        return (*self.shape(batch), self._hidden_size)

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        longest = max(batch["input_ids"].shape[1] for batch in batches)
        fills = {"input_ids": self._padding, "attention_mask": 0, "token_type_ids": 0}
        fills |= {"labels": IGNORED} if self.kind.name == "tokens" else {}

        def filled(batch: Batch, name: str) -> torch.Tensor:
            missing = longest - batch[name].shape[1]
            return F.pad(batch[name], (0, missing), value=fills[name])

        return [
            {**batch, **{name: filled(batch, name) for name in fills if name in batch}}
            for batch in batches
        ]

    def started(
        self, batches: Sequence[Batch], summed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Count nothing: the loss is a mean over the targets."""

    def targets(self, batch: Batch) -> torch.Tensor:
        return batch["count"]

    def count(self, model: nn.Module, batch: Batch) -> int:
        """Return the number of targets, which no output changes."""
        return int(self.kind.targets(batch))

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        body: Any = model.base_model
        return body(**self._inputs(batch))[0]  # type: ignore[no-any-return]

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scores of the model's own head: [rows, labels] or [rows, tokens, labels]."""
        return model(**self._inputs(batch)).logits  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        smoothing = self._smoothing if model.training else 0.0
        return self.kind.loss(_wide(self.logits(model, batch)), batch, smoothing)

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss, then the sums of the kind's metrics, or the right targets."""
        logits = _wide(self.logits(model, batch))
        loss = self.kind.loss(logits, batch)[None]
        if self._sums:
            return torch.cat([loss, self.kind.measured(logits, batch)])
        return torch.cat([loss, _right(logits, batch["labels"])]) if self.measures else loss

    def trial(self, samples: Sequence[Labelled]) -> Trial:
        """Make a trial of a model from a few samples."""
        batch = self.collate(samples)
        alone = [self.collate([sample]) for sample in samples]
        return Trial(
            lambda model: self.logits(model, batch),
            lambda stage: self.hidden(stage, batch),
            [batch, *alone],
        )

    def _inputs(self, batch: Batch) -> dict[str, object]:
        names = [
            name for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch
        ]
        return {**{name: batch[name] for name in names}, **self._options}


def _right(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count the targets whose class has a higher logit than every other: [1]."""
    logits = logits.flatten(0, -2)
    labels = labels.flatten()
    own = logits.gather(1, labels.clamp_min(0)[:, None])
    better = (logits >= own).sum(1) - 1
    return ((better == 0) & (labels != IGNORED)).sum()[None].float()


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _stacked(rows: Sequence[np.ndarray], width: int, fill: int) -> torch.Tensor:
    stacked = np.full((len(rows), width), fill, dtype=np.int64)
    for row, values in enumerate(rows):
        stacked[row, : len(values)] = values
    return torch.from_numpy(stacked)
