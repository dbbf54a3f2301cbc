"""The one process of a model with a head for labels: transformers' own head and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.certify.one_process.expected import IGNORED, Judged, MicroBatch
from trainer.certify.parameters import Learner
from trainer.certify.recording import Sources, State
from trainer.certify.reference import Reference
from trainer.certify.tiny_run import Tiny
from trainer.models.language.forward import without_cache
from trainer.models.spec import ModelSpec
from trainer.recipes.labels.kinds import LabelKind, Labelled


class LabelsReference(Reference):
    """One process with the whole tiny model. The tokens of its samples are not 0, the padding."""

    def __init__(
        self,
        small: Tiny,
        spec: ModelSpec,
        own: Learner,
        data: Sources,
        kind: LabelKind,
        device: torch.device,
    ) -> None:
        self._kind = kind
        self._centring = small.config.trainer.labels.centring
        self._options = without_cache(own.model)
        super().__init__(small, spec, own, data, device, (1,) if kind.scored else ())

    def held_out(self, state: State) -> Judged:
        """Evaluate the held-out samples, each by itself."""
        self._load(state)
        return self._judged(self._evaluated_samples(), 1)

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        """Return micro-batches of one width: what is drawn depends on it."""
        parts = self._samples(step, data_rank)
        longest = max(len(row) for part in parts for sample in part for row in self._rows(sample))
        return [MicroBatch(data_rank, i, *self._padded(p, longest)) for i, p in enumerate(parts)]

    def _collated(self, samples: Sequence[Labelled]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._padded(samples, 0)

    def _padded(self, samples: Sequence[Labelled], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [row for sample in samples for row in self._rows(sample)]
        width = max(width, *map(len, rows))
        ids = [[*row.tolist(), *[0] * (width - len(row))] for row in rows]
        name = "margin" if self._kind.name == "reward" else "labels"
        labels = [sample[name] for sample in samples]
        if self._kind.name == "tokens":
            labels = [[*one.tolist(), *[IGNORED] * (width - len(one))] for one in labels]
        whole = self._kind.name in ("single", "tokens")
        values = labels if whole else [torch.as_tensor(one).tolist() for one in labels]
        targets = torch.tensor(values, dtype=torch.int64 if whole else torch.float32)
        return torch.tensor(ids, device=self._device), targets.to(self._device)

    def _rows(self, sample: Labelled) -> list[np.ndarray]:
        if self._kind.name == "reward":
            return [sample["chosen"], sample["rejected"]]
        return [sample["input_ids"]]

    def _run(self, model: nn.Module, ids: torch.Tensor, **labels: torch.Tensor) -> Any:
        mask = (ids != 0).long()
        return model(input_ids=ids, attention_mask=mask, **labels, **self._options)

    def _output(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return self._run(model, inputs).logits  # type: ignore[no-any-return]

    def _loss_sum(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the model's own mean loss times the number of targets; of rewards TRL's."""
        counted = self._counted(inputs, targets)
        if self._kind.name == "reward":
            scores = self._output(model, inputs)[:, 0].float()
            better = scores[::2]
            worse = scores[1::2]
            losses = F.softplus(-(better - worse - targets))
            return (losses + self._centring * (better + worse) ** 2).sum()
        if self._smoothing and model.training:
            return F.cross_entropy(
                self._output(model, inputs).float().flatten(0, -2),
                targets.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=self._smoothing,
            )
        if not counted:
            return self._output(model, inputs).sum() * 0.0
        return self._run(model, inputs, labels=targets).loss * counted  # type: ignore[no-any-return]

    def _counted(self, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        whole = self._kind.name in ("single", "tokens")
        return int((targets != IGNORED).sum()) if whole else int(targets.numel())

    def _example(self) -> torch.Tensor:
        return self._collated([self._data.training[0]])[0]
