"""Modes that watch every operation of PyTorch: one that allows no collective, one that reads 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten
MOST_READS = 20_000
"""The most truth values read from one line: more means a loop that waits for another value."""


class Alone(ContextDecorator, TorchDispatchMode):
    """A dispatch mode that refuses collective operations where one rank runs alone."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.namespace in ("c10d", "_c10d_functional"):
            actual = f"a collective operation ({func}) in a forward pass or a loss"
            expected = "what each rank computes by itself"
            hint = "The loss and the number of targets are summed over the ranks for it."
            raise ConfigError(Problem("model, loss", actual, expected, hint))
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """A dispatch mode that reads 1, or True, from tensors without values: fake, or on meta.

    `where` returns the line that reads. Raises RuntimeError for a loop that waits for a value.
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        super().__init__()
        self._reads = Counter[str]()
        self._where = where

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
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
