"""The ranks that share rows of tokens, each with a part of every row (context parallelism).

Attention exchanges tokens for heads (Ulysses, arXiv 2309.14509): each rank attends over whole rows
with a part of the heads. All else works on each token by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from trainer.distributed.exchange import Exchange

ATTRIBUTE = "context_ranks"
"""The attribute by which a module's attention finds its ranks."""


class ContextRanks:
    """The exchanges among the ranks of a row, and where this rank's tokens stand in it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.size = self._multiple = exchange.group.size()
        self.rank = exchange.group.rank()
        self._divides = False
        self._length = 0
        """The number of tokens of the rows in the forward pass that runs."""

    def __bool__(self) -> bool:
        """True while rows are divided; outside of a step every rank has whole rows."""
        return self._divides

    @property
    def row(self) -> int:
        """The number of tokens that attention sees: a multiple of the ranks."""
        return -(-self._length // self._multiple) * self._multiple

    def start(self, length: int) -> int:
        """Begin a forward pass over rows of so many tokens; return `row`."""
        self._length = length
        return self.row

    def __deepcopy__(self, memo: Any) -> ContextRanks:
        return self  # a copy of a model has the same ranks

    @contextmanager
    def dividing(self) -> Iterator[None]:
        """Wrap forward and backward passes over parts of rows."""
        self._divides = True
        try:
            yield
        finally:
            self._divides = False

    def part(self, whole: torch.Tensor, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """Return this rank's tokens of whole rows, filled up to a multiple of the ranks."""
        if not self:
            return whole
        missing = -whole.shape[dim] % self._multiple
        if missing:
            ends = [0] * (2 * (whole.ndim - dim - 1)) + [0, missing]
            whole = F.pad(whole, ends, value=fill)
        return whole.chunk(self.size, dim)[self.rank]

    def for_each(self, heads: torch.Tensor) -> torch.Tensor:
        """Repeat key or value heads [batch, heads, part, width] so that each rank has as many.

        A head's copies are next to one another; its gradient is the sum of theirs.
        """
        times = self._multiple // gcd(heads.shape[1], self._multiple)
        return heads.repeat_interleave(times, 1) if times > 1 else heads

    def attended(
        self,
        compute: Callable[..., tuple[torch.Tensor, Any]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention of [batch, heads, part, width] over whole rows, each rank some heads.

        `compute` takes [batch, heads of this rank, row, width] and returns [batch, row, heads,
        width]; so [batch, part, all heads, width] is returned.
        """
        parts = [self._exchange.swap(heads, 1, 2) for heads in (query, key, value)]
        output, weights = compute(*parts)
        return self._exchange.swap(output, 1, 2), weights

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """Return whole rows, from each rank's part."""
        return self._exchange.join(part, 1, self._length)

    def dropped(
        self, module: nn.Dropout, dropout: Callable[..., torch.Tensor], given: torch.Tensor
    ) -> torch.Tensor:
        """Draw for whole rows, of which this rank's part counts: as one process draws."""
        if not self or not module.training or not module.p or given.ndim < 2:
            return dropout(given)
        return given * self.of_rows(lambda whole: dropout(torch.ones_like(whole)), given)

    def of_rows(
        self, draw: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's part of what is drawn for rows like those of `given`."""
        return self.part(draw(given.new_empty(len(given), self._length, *given.shape[2:])))

    def rotated(
        self,
        forward: Callable[..., Any],
        hidden: torch.Tensor,
        position_ids: Any,
        *more: Any,
        **kinds: Any,
    ) -> Any:
        """Compute rotary embeddings as for the whole row, and return this rank's part."""
        if not self:
            return forward(hidden, position_ids, *more, **kinds)
        whole = self.joined(position_ids)
        return tree_map(self.part, forward(hidden, whole, *more, **kinds))
