"""Copies of rows: of a token for each rank that it goes to, and of a row for each of its experts.

To copy rows and to add copies up are each other's gradients. A sum has one order on any device,
and is rounded once, from float32 in 16 bits (`embedding_bag`). `index_add` has no order on a GPU,
and the gradient of an index sorts there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from trainer.distributed.autograd import differentiable_once


class RowCopies(NamedTuple):
    """The copies that are made of rows, any number of each."""

    rows: torch.Tensor
    """The row of each copy, [copies]."""
    by_row: torch.Tensor
    """The copies in the order of their rows, [copies]."""
    starts: torch.Tensor
    """The place in `by_row` where a row's copies begin, [rows]."""

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy [copies, width] of each row [rows, width]."""
        return _Expanded.apply(rows, self)  # type: ignore[no-any-return]

    def sum(self, copies: torch.Tensor) -> torch.Tensor:
        """Return the sum of each row's copies, [rows, width] of [copies, width]."""
        return _Summed.apply(copies, self)  # type: ignore[no-any-return]


def starts_of(mask: torch.Tensor) -> torch.Tensor:
    """Return where the copies of each row begin: it has as many as its part of a mask is true."""
    counts = mask.sum(1)
    return counts.cumsum(0) - counts


def picked(values: torch.Tensor, mask: torch.Tensor, total: int) -> torch.Tensor:
    """Return the values where a mask is true, which it is `total` times: the host does not wait."""
    return values.flatten().repeat_interleave(mask.flatten().long(), output_size=total)


class _RowContext(Protocol):
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


def _sum(copies: torch.Tensor, by_row: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    if not len(by_row):
        return copies.new_zeros(len(starts), *copies.shape[1:])
    return F.embedding_bag(by_row, copies.detach().contiguous(), starts, mode="sum")


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _RowContext, given: torch.Tensor, copies: RowCopies
    ) -> torch.Tensor:
        ctx.save_for_backward(copies.by_row, copies.starts)
        return given.index_select(0, copies.rows)

    @staticmethod
    @differentiable_once("copies of rows")
    def backward(ctx: _RowContext, gradient: torch.Tensor) -> object:  # type: ignore[override]
        return _sum(gradient, *ctx.saved_tensors), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _RowContext, given: torch.Tensor, copies: RowCopies
    ) -> torch.Tensor:
        ctx.save_for_backward(copies.rows)
        return _sum(given, copies.by_row, copies.starts)

    @staticmethod
    @differentiable_once("a sum of rows")
    def backward(ctx: _RowContext, gradient: torch.Tensor) -> object:  # type: ignore[override]
        return gradient.index_select(0, ctx.saved_tensors[0]), None
