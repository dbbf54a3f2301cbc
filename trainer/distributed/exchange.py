"""Exchanges between the ranks of a group, each with its gradient (Megatron-LM, arXiv 1909.08053,
and for parts of a sequence 2205.05198, section 4.2.2).

A part along a dimension has the same size on each rank: what is missing at the end is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.autograd import differentiable_once

Move = Callable[[torch.Tensor], torch.Tensor]
MoveAll = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Counts = Sequence[int]
_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Exchange:
    """The exchanges of one group of ranks. Each is a collective, but for those of no numbers."""

    group: dist.ProcessGroup

    def copy_to(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what all ranks have and each uses for a part: its gradient is their sum."""
        return _exchanged(whole, _same, self._sum)

    def reduce_from(self, term: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' terms, which each uses for the same."""
        return _exchanged(term, self._sum, _same)

    def gather(self, part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Return the whole of the ranks' parts, which each uses for the same."""
        return _exchanged(part, self._gathered(dim, length), lambda whole: self._part(whole, dim))

    def scatter(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of what all ranks have."""
        joined = self._gathered(dim, whole.shape[dim])
        return _exchanged(whole, lambda whole: self._part(whole, dim), joined)

    def gather_to(self, part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Return the whole of the ranks' parts, which each uses for a part: `gather`, `copy_to`."""
        return _exchanged(part, self._gathered(dim, length), self._scattered(dim))

    def reduce_scatter(self, term: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of the sum of the ranks' terms: `reduce_from`, `scatter`."""
        return _exchanged(term, self._scattered(dim), self._gathered(dim, term.shape[dim]))

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the first dimension; every rank has the same values."""
        return values.chunk(self.group.size())[self.group.rank()]

    def swap(self, part: torch.Tensor, split: int, joined: int) -> torch.Tensor:
        """Return this rank's part of dimension `split`, with the ranks' parts of `joined` joined.

        One all-to-all (Ulysses, arXiv 2309.14509, section 3.1).
        """
        return _exchanged(part, self._swapped(split, joined), self._swapped(joined, split))

    def swap_all(
        self, parts: Sequence[torch.Tensor], split: int, joined: int
    ) -> tuple[torch.Tensor, ...]:
        """Return `swap` of each of the parts, by one all-to-all of them together.

        If all are as long along `joined`, the results are views of what came. Parts of several
        dtypes go by themselves.
        """
        if len({part.dtype for part in parts}) > 1:
            return tuple(self.swap(part, split, joined) for part in parts)
        there = self._swapped_all(split, joined)
        back = self._swapped_all(joined, split)
        return _ExchangedTogether.apply(there, back, *parts)  # type: ignore[no-any-return]

    def move(self, rows: torch.Tensor, sent: Counts, received: Counts) -> torch.Tensor:
        """Return the rows that the ranks send to this one, in their order.

        `sent` and `received` are numbers of rows by rank; those sent are in that order, too.
        """
        return _exchanged(rows, self._moved(sent, received), self._moved(received, sent))

    def begin_sum(self, term: torch.Tensor) -> torch.Tensor:
        """Begin to sum the ranks' terms: nothing may read the result before it has landed."""
        total = _ops.all_reduce(term.contiguous(), "sum", self.group.group_name)
        return total  # type: ignore[no-any-return]

    def begin_gather(self, part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Begin to gather the ranks' parts. It lands later, as every result that is begun."""
        whole = self._all_gather_first(part.movedim(dim, 0).contiguous())
        return whole.narrow(0, 0, length).movedim(0, dim)

    def begin_reduce_scatter(self, term: torch.Tensor, dim: int) -> torch.Tensor:
        """Begin to sum the ranks' terms, of which each gets its part."""
        part = self._reduce_scatter_first(self._padded(term.movedim(dim, 0)).contiguous())
        return part.movedim(0, dim)

    def land(self, begun: torch.Tensor) -> torch.Tensor:
        """Wait for a result that was begun, and return it."""
        return _ops.wait_tensor(begun)  # type: ignore[no-any-return]

    def _all_gather_first(self, first: torch.Tensor) -> torch.Tensor:
        """Begin to gather parts of the first dimension."""
        size = self.group.size()
        whole = _ops.all_gather_into_tensor(first, size, self.group.group_name)
        return whole  # type: ignore[no-any-return]

    def _reduce_scatter_first(self, first: torch.Tensor) -> torch.Tensor:
        """Begin to sum terms, of which each rank gets a part of the first dimension."""
        size = self.group.size()
        part = _ops.reduce_scatter_tensor(first, "sum", size, self.group.group_name)
        return part  # type: ignore[no-any-return]

    def _moved(self, sent: Counts, received: Counts) -> Move:
        def moved(rows: torch.Tensor) -> torch.Tensor:
            name = self.group.group_name
            received_rows = _ops.all_to_all_single(rows.contiguous(), [*received], [*sent], name)
            return self.land(received_rows)

        return moved

    def _swapped(self, split: int, joined: int) -> Move:
        ones = [1] * self.group.size()
        moved = self._moved(ones, ones)

        def swapped(part: torch.Tensor) -> torch.Tensor:
            parts = part.unflatten(split, (len(ones), -1)).movedim(split, 0)
            return moved(parts).movedim(0, joined).flatten(joined, joined + 1)

        return swapped

    def _swapped_all(self, split: int, joined: int) -> MoveAll:
        ones = [1] * self.group.size()
        moved = self._moved(ones, ones)

        def swapped(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            by_rank = [part.unflatten(split, (len(ones), -1)).movedim(split, 0) for part in parts]
            alike = len({part.shape[joined] for part in parts}) == 1
            rows = [part.movedim(joined + 1, 1) if alike else part[:, None] for part in by_rank]
            received = moved(_packed(rows)).flatten(0, 1)
            flat = received.split([row[0, 0].numel() for row in rows], 1)
            results = [
                one.unflatten(1, row.shape[2:]).movedim(0, joined)
                for one, row in zip(flat, rows, strict=True)
            ]
            return results if alike else [one.flatten(joined, joined + 1) for one in results]

        return swapped

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.land(self.begin_sum(tensor))

    def _gathered(self, dim: int, length: int) -> Move:
        return lambda part: self.land(self.begin_gather(part, dim, length))

    def _scattered(self, dim: int) -> Move:
        return lambda term: self.land(self.begin_reduce_scatter(term, dim))

    def _part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        parts = self._padded(whole.movedim(dim, 0)).chunk(self.group.size())
        return parts[self.group.rank()].movedim(0, dim)

    def _padded(self, first: torch.Tensor) -> torch.Tensor:
        """Append zeros in the first dimension, up to a multiple of the ranks."""
        missing = -len(first) % self.group.size()
        return F.pad(first, (*[0] * (2 * first.ndim - 1), missing)) if missing else first


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts [n, m, ...] side by side, [n, m, all numbers], each copied once."""
    if torch.compiler.is_compiling():  # it writes each into its place
        return torch.cat([part.flatten(2) for part in parts], 2)
    sizes = [part[0, 0].numel() for part in parts]
    packed = parts[0].new_empty(*parts[0].shape[:2], sum(sizes))
    for place, part in zip(packed.split(sizes, 2), parts, strict=True):
        place.unflatten(2, part.shape[2:]).copy_(part)
    return packed


def _exchanged(tensor: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
    return _Exchanged.apply(tensor, forward, backward)  # type: ignore[no-any-return]


class _ExchangeContext(Protocol):
    move: Move
    """The move of the backward pass."""


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _ExchangeContext, tensor: torch.Tensor, forward: Move, backward: Move
    ) -> torch.Tensor:
        ctx.move = backward
        return forward(tensor).contiguous()  # models' code makes views of it

    @staticmethod
    @differentiable_once("an exchange between ranks")
    def backward(ctx: _ExchangeContext, gradient: torch.Tensor) -> object:  # type: ignore[override]
        return ctx.move(gradient), None, None


class _TogetherContext(Protocol):
    needs_input_grad: tuple[bool, ...]
    move: MoveAll
    """The move of the backward pass."""

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None: ...


class _ExchangedTogether(torch.autograd.Function):
    """Moves several tensors at a time, and back the gradients of those that have one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _TogetherContext, there: MoveAll, back: MoveAll, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.move = back
        moved = there(tensors)
        needed = ctx.needs_input_grad[2:]
        frozen = [tensor for tensor, need in zip(moved, needed, strict=True) if not need]
        ctx.mark_non_differentiable(*frozen)
        return tuple(moved)

    @staticmethod
    @differentiable_once("an exchange between ranks")
    def backward(  # type: ignore[override]
        ctx: _TogetherContext, *gradients: torch.Tensor
    ) -> tuple[object, ...]:
        needed = ctx.needs_input_grad[2:]
        places = [place for place, need in enumerate(needed) if need]
        moved = ctx.move([gradients[place] for place in places])
        result: list[object] = [None] * len(needed)
        for place, gradient in zip(places, moved, strict=True):
            result[place] = gradient
        return None, None, *result


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of a vocabulary that the ranks of a group share: each has the logits of its
    own part alone (Megatron-LM, section 3). n tokens, v entries of a rank, t ranks.
    """

    total: int
    start: int
    stop: int
    most: int
    """The most entries of a rank."""
    ranks: Exchange

    def find(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of tokens within this part, 0 for others, and which it has."""
        own = (tokens >= self.start) & (tokens < self.stop)
        return (tokens - self.start).where(own, 0), own

    def gathered(self, *values: torch.Tensor) -> torch.Tensor:
        """Return values [n] of all ranks: [values, t, n]. Collective."""
        return self.ranks.gather(torch.stack(values)[:, None], 1, self.ranks.group.size())

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the token with the highest of all ranks' logits: the first of equal
        ones. Collective.
        """
        highest, index = logits.double().max(-1)  # float64 holds both exactly
        values, tokens = self.gathered(highest, (index + self.start).double())
        return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()


def vocabulary_shard_of(weight: torch.Tensor) -> VocabularyShard | None:
    """Return this rank's shard, if tensor ranks have a part of an embedding or head each."""
    names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    if "tensor" not in names:
        return None
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    axis = names.index("tensor")
    size = mesh.size(axis)
    rank = mesh.get_local_rank(axis)
    total = len(weight)
    most = -(-total // size)
    first = most * rank
    ranks = Exchange(mesh.get_group(axis))
    return VocabularyShard(total, first, min(first + most, total), most, ranks)


def vocabulary_shard_of_head(head: nn.Module) -> VocabularyShard | None:
    """Return this rank's shard of an output head, which an adapter may wrap; None: it has all."""
    return next(filter(None, map(vocabulary_shard_of, head.parameters())), None)
