"""The ranks that share sequences, each with a part of every one (context parallelism).

Attention exchanges tokens for heads (Ulysses, arXiv 2309.14509): each rank attends over whole rows
with a part of the heads. If more ranks share a row than can divide the heads, they form groups: the
ranks of a group exchange, and each gathers the keys and values of all groups (as Llama 3, arXiv
2407.21783, section 3.3.2). Layers with state along the sequence compute whole documents
(`documents.py`). All else works on each token by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from trainer.distributed.documents import Lengths, Places, WholeDocuments
from trainer.distributed.exchange import Exchange

ATTRIBUTE = "context_ranks"
"""The attribute by which a module's attention finds its ranks."""


@dataclass(frozen=True)
class Division:
    """The division of rows over `size` ranks, in `groups` of neighbours.

    Of several groups each has a section from a row's head and one from its tail: under a causal
    mask all then attend to as many tokens. The ranks of a group have equal parts of its tokens.
    """

    size: int
    groups: int = 1

    @property
    def group_size(self) -> int:
        """The ranks of a group, which exchange tokens for heads."""
        return self.size // self.groups

    def filled(self, length: int) -> int:
        """Return the smallest number of tokens, not below `length`, that can be divided."""
        multiple = self.size * (2 if self.groups > 1 else 1)
        return -(-length // multiple) * multiple

    def sections(self, rank: int, row: int) -> list[tuple[int, int]]:
        """Return the begin and end of both sections of a rank's group, in rows of `row` tokens."""
        each = row // (2 * self.groups)
        group = rank // self.group_size
        return [(n * each, (n + 1) * each) for n in (group, 2 * self.groups - 1 - group)]

    def places(self, row: int) -> list[Places]:
        """Return the tokens that each rank has of rows of `row` tokens, which can be divided."""
        tokens = np.arange(row)
        own = []
        for rank in range(self.size):
            sections = self.sections(rank, row) if self.groups > 1 else [(0, row)]
            group = np.concatenate([tokens[begin:end] for begin, end in sections])
            own.append(np.split(group, self.group_size)[rank % self.group_size])
        return own

    def part(self, whole: torch.Tensor, rank: int, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """Return a rank's tokens of whole rows, which are filled up first."""
        if missing := self.filled(whole.shape[dim]) - whole.shape[dim]:
            ends = [0] * (2 * (whole.ndim - dim - 1)) + [0, missing]
            whole = F.pad(whole, ends, value=fill)
        if self.groups > 1:
            sections = self.sections(rank, whole.shape[dim])
            whole = torch.cat([whole.narrow(dim, at, end - at) for at, end in sections], dim)
        return whole.chunk(self.group_size, dim)[rank % self.group_size]

    def in_order(self, groups: torch.Tensor, dim: int) -> torch.Tensor:
        """Return whole rows, of the tokens of one group after another's."""
        sections = groups.chunk(2 * self.groups, dim)  # head and tail in turn, tails from the end
        return torch.cat([*sections[::2], *sections[::-2]], dim)


class ContextRanks:
    """The exchanges among the ranks of a row, and where this rank's tokens stand in it.

    `heads`: the ranks of a group; `rows`: those with the same heads in all groups. None: one rank.
    `every`: all ranks of a row, where it is neither of these.
    """

    def __init__(
        self,
        division: Division,
        heads: Exchange | None,
        rows: Exchange | None,
        every: Exchange | None = None,
    ) -> None:
        self.division = division
        self._heads = heads
        self._rows = rows
        self._every = every or heads or rows
        group = rows.group.rank() if rows else 0
        self.rank = group * division.group_size + (heads.group.rank() if heads else 0)
        self._divides = False
        self._length = 0
        """The number of tokens of the rows in the forward pass that runs."""

    def __bool__(self) -> bool:
        """True while rows are divided; outside of a step every rank has whole rows."""
        return self._divides

    @property
    def row(self) -> int:
        """The number of tokens that attention sees: those of the row, filled up."""
        return self.division.filled(self._length)

    @property
    def sections(self) -> list[tuple[int, int]]:
        """The begin and end of each part of a row whose queries this rank has; empty: all."""
        return self.division.sections(self.rank, self.row) if self.division.groups > 1 else []

    def start(self, length: int) -> int:
        """Begin a forward pass over rows of so many tokens; return `row`."""
        self._length = length
        return self.row

    def __deepcopy__(self, memo: object) -> ContextRanks:
        return self  # a copy of a model has the same ranks

    @contextmanager
    def dividing(self, divides: bool = True) -> Iterator[None]:
        """Wrap forward and backward passes over parts of rows."""
        before = self._divides
        self._divides = divides
        try:
            yield
        finally:
            self._divides = before

    def documents(self, lengths: Lengths) -> WholeDocuments:
        """Return the documents of a micro-batch, of which this rank has a part."""
        places = self.division.places(sum(lengths[0]))
        return WholeDocuments(lengths, places, self.rank, self._every, self.alone)

    def alone(self) -> AbstractContextManager[None]:
        """Wrap what this rank computes of whole documents."""
        return self.dividing(False)

    def part(self, whole: torch.Tensor, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """Return this rank's tokens of whole rows, filled up to a number that can be divided."""
        return self.division.part(whole, self.rank, dim, fill) if self else whole

    def for_each(self, heads: torch.Tensor) -> torch.Tensor:
        """Repeat key or value heads [batch, heads, part, width] until a group's ranks divide them.

        A head's copies are next to one another; its gradient is the sum of theirs.
        """
        ranks = self.division.group_size
        times = ranks // gcd(heads.shape[1], ranks)
        return heads.repeat_interleave(times, 1) if times > 1 else heads

    def own_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [heads] of the heads that this rank attends with."""
        return self._heads.own(values) if self._heads else values

    def attended(
        self,
        compute: Callable[..., tuple[torch.Tensor, object]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention of [batch, heads, part, width] over whole rows, each rank some heads.

        `compute` takes [batch, heads of this rank, row, width] and returns [batch, row, heads,
        width]; so [batch, part, all heads, width] is returned. Between groups it gets each of
        `sections`, with the queries in it, and the keys and values up to its end.
        """
        if self._heads:
            query, key, value = self._heads.swap_all([query, key, value], 1, 2)
        if self._rows:
            others = [self._rows.gather_to(part, 2, self.row) for part in (key, value)]
            key, value = (self.division.in_order(part, 2) for part in others)
            outputs = [
                compute(part, key[:, :, : ends[1]], value[:, :, : ends[1]], section=ends)[0]
                for part, ends in zip(query.chunk(2, 2), self.sections, strict=True)
            ]
            output = torch.cat(outputs, 1)
            weights = None
        else:
            output, weights = compute(query, key, value)
        return self._heads.swap(output, 1, 2) if self._heads else output, weights

    def summed(self, term: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' terms, one of each part of a row.

        Each rank uses it for the same, and gets the gradient of its own term.
        """
        for exchange in (self._heads, self._rows):
            term = exchange.reduce_from(term) if exchange else term
        return term

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """Return whole rows, from each rank's part."""
        if self._heads:
            part = self._heads.gather(part, 1, self.row // self.division.groups)
        if self._rows:
            part = self.division.in_order(self._rows.gather(part, 1, self.row), 1)
        return part.narrow(1, 0, self._length)

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
        forward: Callable[..., object],
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        *more: object,
        **kinds: object,
    ) -> object:
        """Compute rotary embeddings as for the whole row, and return this rank's part."""
        if not self:
            return forward(hidden, position_ids, *more, **kinds)
        whole = self.joined(position_ids)
        return tree_map(self.part, forward(hidden, whole, *more, **kinds))
