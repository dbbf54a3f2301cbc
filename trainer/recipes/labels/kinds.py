"""The kinds of labels: the head that each needs, its loss, and what an evaluation counts.

Each loss is transformers' own for that head, as a sum and the number that its mean divides by; the
loss of rewards is TRL's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from trainer.recipes.labels import metrics
from trainer.tasks.task import IGNORED, Batch

Name = Literal["single", "multi", "regression", "tokens", "reward"]
Labelled = Mapping[str, Any]
"""A sample: `input_ids` [n] and `labels`; for rewards `chosen` [n], `rejected` [m] and `margin`."""


class LabelKind(ABC):
    """A kind of labels, of `count` classes or outputs."""

    name: Name
    problem: str | None = None
    """Transformers' `problem_type`, which chooses the loss of its heads for sequences."""
    smooths: bool = False
    """True if labels can be smoothed."""
    scored: bool = False
    """True if a target is right or wrong by its highest logit."""

    def __init__(self, count: int) -> None:
        self.count = count

    def sequences(self, sample: Labelled) -> list[np.ndarray]:
        """Return the sequences of a sample, each a row of a micro-batch."""
        return [sample["input_ids"]]

    @abstractmethod
    def collated(self, samples: Sequence[Labelled], width: int) -> Batch:
        """Return `labels`, and whatever else the loss needs; `width`: the longest row's tokens."""

    @abstractmethod
    def targets(self, batch: Batch) -> torch.Tensor:
        """Count what the mean of the loss divides by."""

    @abstractmethod
    def loss(self, logits: torch.Tensor, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
        """Return the summed loss of `logits`, float32: [rows, count] or [rows, tokens, count]."""

    @property
    @abstractmethod
    def measures(self) -> tuple[str, ...]:
        """Names of the sums that an evaluation takes."""

    @abstractmethod
    def measured(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the sums of `measures`."""

    @abstractmethod
    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute the metrics from the sums over all ranks, all divided by the same number."""


class Single(LabelKind):
    """One of several classes: cross entropy, -log softmax(logits)[label]."""

    name: Name = "single"
    problem: str | None = "single_label_classification"
    smooths = True
    scored = True

    def collated(self, samples: Sequence[Labelled], width: int) -> Batch:
        labels = [IGNORED if "blank" in sample else int(sample["labels"]) for sample in samples]
        return {"labels": torch.tensor(labels)}

    def targets(self, batch: Batch) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    def loss(self, logits: torch.Tensor, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2),
            batch["labels"].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=smoothing,
        )

    @property
    def measures(self) -> tuple[str, ...]:
        return metrics.names_of_classes(self.count)

    def measured(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return metrics.count_classes(logits.flatten(0, -2), batch["labels"].flatten())

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return metrics.of_classes(sums, self.count)


class OfTokens(Single):
    """A class for each token: cross entropy over the tokens that have one."""

    name = "tokens"
    problem = None

    def collated(self, samples: Sequence[Labelled], width: int) -> Batch:
        labels = torch.full((len(samples), width), IGNORED)
        for row, sample in enumerate(samples):
            own = torch.as_tensor(sample["labels"], dtype=torch.int64)
            if "blank" not in sample:
                labels[row, : len(own)] = own
        return {"labels": labels}


class _Outputs(LabelKind):
    """Labels that are numbers, [count] a sample; the mean divides by samples x count."""

    def collated(self, samples: Sequence[Labelled], width: int) -> Batch:
        labels = [torch.as_tensor(sample["labels"], dtype=torch.float32) for sample in samples]
        return {"labels": torch.stack(labels), "counts": _counts(samples)}

    def targets(self, batch: Batch) -> torch.Tensor:
        return batch["counts"].sum().long() * self.count

    def loss(self, logits: torch.Tensor, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
        return (self._each(logits, batch["labels"]).sum(1) * batch["counts"]).sum()

    @abstractmethod
    def _each(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each number, [rows, count]."""


class Multi(_Outputs):
    """Several classes or none: binary cross entropy of each."""

    name = "multi"
    problem = "multi_label_classification"

    def _each(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    @property
    def measures(self) -> tuple[str, ...]:
        return metrics.names_of_sets(self.count)

    def measured(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return metrics.count_sets(logits, batch["labels"], batch["counts"])

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return metrics.of_sets(sums, self.count)


class Regression(_Outputs):
    """Numbers: the squared error of each."""

    name = "regression"
    problem = "regression"

    def __init__(self, count: int, centre: Sequence[float] = ()) -> None:
        """`centre`: numbers near the labels, [count], from which sums of products are taken."""
        super().__init__(count)
        self._centre = torch.tensor(list(centre) or [0.0] * count)

    def _each(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits - labels).square()

    @property
    def measures(self) -> tuple[str, ...]:
        return metrics.names_of_numbers(self.count)

    def measured(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        centre = self._centre.to(logits.device)
        values = (logits - centre, batch["labels"] - centre)
        return metrics.count_numbers(*values, batch["counts"])

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return metrics.of_numbers(sums, self.count)


class Reward(LabelKind):
    """A score for each of two answers, r and s, of which the first is better by a margin m.

    -log sigmoid(r - s - m) + c (r + s)^2: Bradley-Terry, with the margin of arXiv 2307.09288 and
    the centring term of arXiv 2312.09244, as in TRL's RewardTrainer.
    """

    name = "reward"

    def __init__(self, count: int = 1, centring: float = 0.0) -> None:
        super().__init__(count)
        self._centring = centring

    def sequences(self, sample: Labelled) -> list[np.ndarray]:
        return [sample["chosen"], sample["rejected"]]

    def collated(self, samples: Sequence[Labelled], width: int) -> Batch:
        margins = torch.tensor([float(sample["margin"]) for sample in samples])
        return {"margins": margins, "counts": _counts(samples)}

    def targets(self, batch: Batch) -> torch.Tensor:
        return batch["counts"].sum().long()

    def loss(self, logits: torch.Tensor, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
        better, worse = _pairs(logits)
        each = -F.logsigmoid(better - worse - batch["margins"])
        if self._centring:
            each = each + self._centring * (better + worse).square()
        return (each * batch["counts"]).sum()

    measures = ("right", "margin", "chosen", "rejected")

    def measured(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        better, worse = _pairs(logits)
        values = torch.stack([(better > worse).float(), better - worse, better, worse])
        return (values * batch["counts"]).sum(1)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        named = {"right": "accuracy", "margin": "margin"}
        named |= {"chosen": "reward_chosen", "rejected": "reward_rejected"}
        return {named[name]: value for name, value in sums.items()}


KINDS: dict[str, type[LabelKind]] = {
    kind.name: kind for kind in (Single, Multi, Regression, OfTokens, Reward)
}


def _pairs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the better and of the worse answers, [pairs] each."""
    scores = logits[:, 0]
    return scores[0::2], scores[1::2]


def _counts(samples: Sequence[Labelled]) -> torch.Tensor:
    """Return 1 for each sample that counts, and 0 for one that fills up a batch."""
    return torch.tensor([float("blank" not in sample) for sample in samples])
