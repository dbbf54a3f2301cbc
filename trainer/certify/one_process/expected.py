"""The expected result of a step and of an evaluation, in one process, with its own rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trainer.certify.outputs import Outputs
from trainer.certify.recording import State, Tensors
from trainer.state import WEIGHT

IGNORED = -100


class MicroBatch(NamedTuple):
    data_rank: int
    number: int
    """Its number among the micro-batches of its data rank."""
    inputs: Any
    """Token ids [batch, sequence], or whatever a module takes."""
    targets: Any
    start: int = 0
    row: int = 0
    """The place of its first token in a packed row of so many tokens."""


@dataclass(frozen=True)
class Rounding:
    """The largest differences of one process in the run's low precision from float32."""

    loss: float
    """Relative, as that of the norm."""
    norm: float
    gradients: dict[str, float]
    outputs: dict[tuple[int, int, str], float]
    least: float
    """The relative rounding of one number."""
    runs: tuple[Tensors, ...] = ()
    """The gradients of each of these runs of one process."""
    is_low: bool = False
    """True if they are in low precision."""


EXACT = Rounding(0.0, 0.0, {}, {}, 0.0)
"""No difference: that of a run in float32."""


@dataclass(frozen=True)
class Expected:
    """The expected result of one step."""

    loss: float
    norm: float
    gradients: Tensors
    state: State
    """The state after the step: weights (float32) and optimizer state."""
    targets: int
    rounding: Rounding
    outputs: Outputs = field(default_factory=dict)
    biases: Tensors = field(default_factory=dict)
    """The biases of routers after the step, which in low precision follow rounding."""
    cancelled: frozenset[str] = frozenset()
    """The gradients that are zero by symmetry, and here rounding alone."""

    @property
    def weights(self) -> Tensors:
        """The weights after the step, in float32, by name."""
        return {name: value for (name, part), value in self.state.items() if part == WEIGHT}

    @property
    def overflows(self) -> bool:
        """True if the gradient is not finite, so that nothing may change."""
        return not math.isfinite(self.norm)


class Figure(NamedTuple):
    """The sum of a measure over the targets of an evaluation, and what it is compared with."""

    total: float
    scale: float
    """The sum of the sizes of what it is a difference of: errors are relative to it."""


class Judged(NamedTuple):
    """The expected result of an evaluation."""

    loss: float
    targets: int
    right: tuple[int, ...]
    """The number of correct targets, for each of the task's measures."""
    unsure: int = 0
    """The number of targets whose correctness may depend on rounding."""
    rounding: float = 0.0
    """The relative difference of the loss where float8 rounds otherwise."""
    figures: tuple[Figure, ...] = ()
    """The measures of a task that counts no correct targets, in place of `right`."""


def right_of(
    logits: torch.Tensor, targets: torch.Tensor, most: int, margin: float
) -> tuple[int, int]:
    """Count targets among the `most` highest logits, and those within `margin` of the edge."""
    logits = logits.float().flatten(0, -2)
    targets = targets.flatten()
    logits = logits[targets != IGNORED]
    targets = targets[targets != IGNORED]
    if not len(targets):
        return 0, 0
    own = logits.gather(1, targets[:, None])[:, 0]
    others = logits.scatter(1, targets[:, None], -math.inf).topk(most).values[:, -1]
    unsure = (own - others).abs() <= margin * logits.abs().max()
    return int((own > others).sum()), int(unsure.sum())


def largest_value(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def norm_of(gradients: Tensors) -> float:
    return float(torch.stack([value.double().norm() for value in gradients.values()]).norm())
