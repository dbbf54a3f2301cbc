"""The rounding of one process: a step that is computed again with other rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from trainer.certify.one_process.expected import (
    EXACT,
    MicroBatch,
    Rounding,
    largest_value,
    norm_of,
    relative_error,
)
from trainer.certify.one_process.factors import lowered, shaken
from trainer.certify.outputs import Outputs, differences
from trainer.certify.recording import Tensors
from trainer.layout import Layout

REPEATS = 6
FEWER = 3
"""The number of repetitions that measure rounding: of float8 in the first steps, and otherwise."""
SAME = 1e-6
"""The most by which a step that is repeated as it is may differ: sums by several threads."""
HALF_A_UNIT = torch.finfo(torch.float32).eps / 2
"""The relative rounding of one number in float32."""


class Computed(NamedTuple):
    """The loss, gradients and modules' outputs of a step, without its update."""

    loss: float
    gradients: Tensors
    outputs: Outputs


class Buffers:
    """The buffers with which a model begins a step, and which the step may move."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = dict(model.named_buffers())
        self.keep()

    def keep(self) -> None:
        """Begin a step."""
        self._begun = self._values()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give copies of the model, with which the step is repeated, the values it began with."""
        after = self._values()
        self._set(self._begun)
        yield
        self._set(after)

    def _values(self) -> Tensors:
        return {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    def _set(self, values: Tensors) -> None:
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(values[name])


Compute = Callable[[nn.Module, Sequence[MicroBatch]], Computed]
"""Computes a step on micro-batches with a model."""


def rounding_of_low_precision(
    model: nn.Module,
    compute: Compute,
    groups: Sequence[Sequence[MicroBatch]],
    exact: Computed,
    layout: Layout,
    repeats: int,
) -> Rounding:
    """Measure the rounding of the run's low precision, by the largest difference from `exact`.

    In 16 bits, the step is repeated with gradients summed in that precision, and summed in float32;
    in float8, `repeats` times with weights that differ a little. The losses of `groups`, each of
    some micro-batches, add up to the step's.
    """
    parts = [part for group in groups for part in group]
    dtype = getattr(torch, layout.precision)
    runs: list[Computed] = []

    def low() -> nn.Module:
        return model if dtype == torch.float32 else lowered(model, dtype, layout.float8)

    if dtype != torch.float32:
        runs.append(compute(low(), parts))
        own = low()
        alone = [compute(own, group) for group in groups]
        summed: Tensors = {}
        for name in runs[0].gradients:
            terms = [one.gradients[name] for one in alone if name in one.gradients]
            summed[name] = torch.stack(terms).sum(0)
        runs.append(Computed(sum(one.loss for one in alone), summed, {}))
    if layout.float8 != "none":
        runs += [compute(shaken(low(), seed), parts) for seed in range(repeats)]
    return _rounding(exact, runs, dtype)


def rounding_of_float32(
    model: nn.Module, compute: Compute, parts: Sequence[MicroBatch], exact: Computed
) -> Rounding:
    """Measure the rounding of float32: repeat the step with each weight rounded another way.

    A deep model with random weights may magnify this rounding a thousand times in the gradients of
    its first layers. Of a step that is another one when it is repeated as it is, no difference is
    taken for rounding.
    """
    same = compute(shaken(model, 0, 0.0), parts)
    norms = norm_of(same.gradients), norm_of(exact.gradients)
    if max(relative_error(same.loss, exact.loss), relative_error(*norms)) > SAME:
        return EXACT
    runs = [compute(shaken(model, seed, HALF_A_UNIT), parts) for seed in range(FEWER)]
    return _rounding(exact, runs, torch.float32)


def _rounding(exact: Computed, runs: Sequence[Computed], dtype: torch.dtype) -> Rounding:
    outputs = dict[tuple[int, int, str], float]()
    for run in runs:
        for key, value in run.outputs.items():
            largest = float(differences(value, exact.outputs[key]).max())
            outputs[key] = max(outputs.get(key, 0.0), largest)
    none = torch.zeros(())  # the gradient of an expert that another rounding does not choose
    gradients = {
        name: max(largest_value(run.gradients.get(name, none) - value) for run in runs)
        for name, value in exact.gradients.items()
    }
    norm = norm_of(exact.gradients)
    return Rounding(
        max(relative_error(run.loss, exact.loss) for run in runs),
        max(relative_error(norm_of(run.gradients), norm) for run in runs),
        gradients,
        outputs,
        torch.finfo(dtype).eps / 2,
        tuple(run.gradients for run in runs),
        dtype != torch.float32,
    )
