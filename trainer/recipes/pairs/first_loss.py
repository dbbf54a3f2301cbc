"""The test that comes free with every run: before the first step, the model is its reference.

So each margin is 0, and the sigmoid loss is ln 2. It is taken on the samples of the first step,
in their order, without dropout: a reference of another sample, or one that was computed otherwise
than the model computes now, shows at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from trainer.data.mixture import Source
from trainer.engines import Engine
from trainer.errors import NumericsError, Problem
from trainer.recipes.pairs.reference import log_probabilities
from trainer.recipes.pairs.task import PairsTask

TOLERANCE = 1e-6
"""The largest difference of a loss, and of a margin of small log-probabilities, in float32."""
ROUNDING = 1e-7
"""The same of large ones, relative to the largest: sums of tokens in another order."""
MOST = 256
"""The most pairs that are looked at."""


class FirstLoss(NamedTuple):
    """The mean loss before the first step, and what is farthest from it."""

    loss: float
    expected: float
    margin: float
    """The largest difference of an answer's log-probability from the reference's, times beta."""
    worst: int
    """The number of the pair that has it."""
    allowed: float


def first_loss(engine: Engine, task: PairsTask, train: Source, numbers: np.ndarray) -> FirstLoss:
    """Compute the loss of these samples, and what it is if all margins are 0. Collective."""
    numbers = np.unique(numbers)[:MOST]
    now = log_probabilities(engine, task, train, numbers)
    samples = [train[int(number)] for number in numbers]
    reference = np.stack([sample["reference"] for sample in samples])
    differences = task.keys.beta * np.abs(now - reference).max(1)
    batch = task.collate(samples)
    loss, expected = (
        float(task.losses_at(torch.from_numpy(values), batch).mean()) for values in (now, reference)
    )
    largest = task.keys.beta * float(np.abs(reference).max())
    worst = int(np.argmax(differences))
    allowed = max(TOLERANCE, ROUNDING * largest)
    return FirstLoss(loss, expected, float(differences[worst]), int(numbers[worst]), allowed)


def check(first: FirstLoss, precision: str, name: str) -> str:
    """Return a line on the first loss. Raises NumericsError for one that is not as expected, if
    the precision is float32."""
    off = abs(first.loss - first.expected)
    known = ", which is ln 2" if math.isclose(first.expected, math.log(2), abs_tol=1e-9) else ""
    line = f"first loss {first.loss:.7f} ({name}), {first.expected:.7f} with the reference itself"
    line = f"{line}{known}: off by {off:.1e}, the largest margin by {first.margin:.1e}"
    if precision != "float32":
        return f"{line} (in {precision})"
    if off <= first.allowed and first.margin <= first.allowed:
        return line
    place = f"the first loss, pair {first.worst}"
    actual = f"{first.loss:.7f}, and a margin of {first.margin:.3g} before the first step"
    expected = f"{first.expected:.7f}{known}, and 0, up to {first.allowed:.0e}"
    hint = (
        "The reference is not what the model computes now: a random number is drawn in "
        "evaluation, or a sequence's result depends on the others in its micro-batch."
    )
    raise NumericsError(Problem(place, actual, expected, hint))
