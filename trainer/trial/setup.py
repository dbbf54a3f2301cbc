"""The tiny copy of a model, rows of tokens for it, and the comparison of gradients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import ConfigError, Problem
from trainer.models.materialise import on_host
from trainer.models.names import differing, gradients_of
from trainer.models.spec import ModelSpec

aten = torch.ops.aten
IGNORED = -100
LENGTH = 20
"""The number of tokens in a row: more than two attention windows of the tiny copy."""
WIDER = LENGTH + 8
"""The number of tokens in a padded row."""
SINGLE = 4
"""The number of rows of one token, tried for parameters that they leave without a gradient."""
MOST_READS = 20_000
"""The most truth values read from one line: more means a loop that waits for another value."""
TOLERANCE = 1e-4
"""The relative error allowed in float32, larger than rounding and smaller than any mistake."""


Batch = dict[str, torch.Tensor]


class TrialTask(Protocol):
    def prepare(self, model: nn.Module) -> nn.Module: ...
    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Batch: ...
    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor: ...


def tiny(spec: ModelSpec) -> tuple[ModelSpec, nn.Module]:
    """Return a tiny copy and its spec, on the CPU in float32; the same values at each call.

    No weight is left at zero: an initial value of zero would hide what it multiplies.
    """
    small = spec.tiny.copy() if spec.tiny.copy else spec
    return small, drawn(small)


def drawn(small: ModelSpec) -> nn.Module:
    """Build the tiny model anew, so that nothing is left over from an earlier pass."""
    model = on_host(small)
    spread(model, seed=0)
    return model


def spread(model: nn.Module, seed: int) -> None:
    """Draw the weights anew, such that activations keep their scale; files stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        values = parameter.data + 0.1 * noise
        if parameter.dim() > 1:
            values = noise / parameter.shape[-1] ** 0.5
        parameter.data = values.to(parameter.dtype)


def row_of(spec: ModelSpec) -> torch.Tensor:
    """Draw the ids of one row, [LENGTH], none of them 0, which is the padding."""
    generator = torch.Generator().manual_seed(2)
    return 1 + torch.randint(spec.language.vocabulary - 1, (LENGTH,), generator=generator)


def batches(spec: ModelSpec, task: TrialTask) -> Iterator[Batch]:
    """Yield ragged rows, one without a target; one row alone; a micro-batch without a target."""
    ids = np.asarray(row_of(spec))
    for lengths, silent in (((LENGTH, 3, 11, 7), {2}), ((LENGTH,), set[int]()), ((5, 9), {0, 1})):
        samples = []
        for row, length in enumerate(lengths):
            targets = np.full(length, IGNORED)
            if row not in silent:
                targets[:-1] = ids[1:length]  # labels are as long as the ids: none for the last
            samples.append({"input_ids": ids[:length], "targets": targets})
        batch = task.collate(samples)
        # the task's padding may be larger than the vocabulary
        yield {**batch, "input_ids": batch["input_ids"] % spec.language.vocabulary}


def differing_gradient(
    ours: nn.Module, theirs: nn.Module, most: float = 10 * TOLERANCE
) -> tuple[str, float] | None:
    """Return the first parameter whose gradient differs, and by what share of its largest entry."""
    return differing(gradients_of(ours), gradients_of(theirs), most)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch at the end."""
    outside = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])


class Alone(ContextDecorator, TorchDispatchMode):
    """A dispatch mode that refuses collective operations where one rank runs alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            seen = f"a collective operation ({func}) in a forward pass or a loss"
            expected = "what each rank computes by itself"
            mend = "The loss and the number of targets are summed over the ranks for it."
            raise ConfigError(Problem("model, loss", seen, expected, mend))
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """A dispatch mode that reads 1, or True, from tensors without values: fake, or on meta.

    `where` returns the line that reads. Raises RuntimeError for a loop that waits for a value.
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        super().__init__()
        self._reads, self._where = Counter[str](), where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = func is aten._local_scalar_dense.default or func is aten.equal.default
        if not read or not (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        if dtype is torch.bool:
            self._reads[where := self._where()] += 1
            if self._reads[where] > MOST_READS:
                problem = "a loop waits for a value, which fake tensors have not, below"
                raise RuntimeError(f"{problem} {where}")
        if func is aten.equal.default:
            return True
        return 1.0 if dtype.is_floating_point else dtype is torch.bool or 1
