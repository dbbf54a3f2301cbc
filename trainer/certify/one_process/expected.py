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
    """The length in tokens of the packed sequence in which it starts at `start`; 0: none."""


@dataclass(frozen=True)
class Rounding:
    """The largest differences that rounding makes in one process, in the run's precision."""

    loss: float
    """Relative, as is that of the norm."""
    norm: float
    gradients: dict[str, float]
    """Absolute, by parameter."""
    outputs: dict[tuple[int, int, str], float]
    """Absolute, the largest of any feature: few repetitions say little of one feature alone."""
    least: float
    """The relative rounding of one number."""
    runs: tuple[Tensors, ...] = ()
    """The gradients of each repetition by which the rounding was measured."""
    is_low: bool = False
    """True if `runs` are in 16 bits."""


EXACT = Rounding(0.0, 0.0, {}, {}, 0.0)
"""No difference: float32, unless its rounding is measured."""


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
    """The names of gradients that are zero by symmetry: their values are rounding alone."""

    @property
    def weights(self) -> Tensors:
        """The weights after the step, in float32, by name."""
        return {name: value for (name, part), value in self.state.items() if part == WEIGHT}

    @property
    def overflows(self) -> bool:
        """True if the gradient is not finite, so that the step may change nothing."""
        return not math.isfinite(self.norm)


class Figure(NamedTuple):
    """The sum of a measure over the targets of an evaluation, and the scale of its error."""

    total: float
    scale: float
    """The summed magnitudes of the terms of the measure: errors are relative to it."""


class Judged(NamedTuple):
    """The expected result of an evaluation."""

    loss: float
    targets: int
    right: tuple[int, ...]
    """For each of the task's measures, the number of correct targets, or another sum over them."""
    unsure: int = 0
    """The number of targets whose correctness may depend on rounding."""
    rounding: float = 0.0
    """The relative difference of the loss if float8 rounds differently."""
    figures: tuple[Figure, ...] = ()
    """The measures of a task that counts no correct targets, in place of `right`."""


def right_of(
    logits: torch.Tensor, targets: torch.Tensor, most: int, margin: float
) -> tuple[int, int]:
    """Count targets among the `most` highest logits, and those that rounding may move in or out.

    `logits` [..., classes], `targets` [...]; `margin` is relative to the largest logit.
    """
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


def relative_error(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


def norm_of(gradients: Tensors) -> float:
    return float(torch.stack([value.double().norm() for value in gradients.values()]).norm())
