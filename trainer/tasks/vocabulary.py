"""A vocabulary split over tensor ranks: each has the logits of its words alone (Megatron-LM, arXiv
1909.08053, section 3).

Shapes: n tokens, v words on this rank, t ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Words:
    """The words of this rank, of a vocabulary that the ranks of a group have together."""

    total: int
    start: int
    stop: int
    most: int
    """The most words of a rank."""
    group: Any

    def find(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of tokens in this rank's part, 0 for others', and which are its own."""
        own = (tokens >= self.start) & (tokens < self.stop)
        return (tokens - self.start).where(own, 0), own

    def gathered(self, *values: torch.Tensor) -> torch.Tensor:
        """Return values [n] of all ranks: [values, t, n]. Collective."""
        mine = torch.stack(values)
        found = mine.new_empty(self.group.size() * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(found, mine, group=self.group)
        return found.view(-1, *mine.shape).transpose(0, 1)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the number of the word with the highest of all ranks' logits: the first of equal
        ones. Collective.
        """
        highest, index = logits.double().max(-1)  # float64 holds both exactly
        values, words = self.gathered(highest, (index + self.start).double())
        return words.gather(0, values.argmax(0, keepdim=True))[0].long()

    def summed(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' vectors, with the same gradient on each. Collective."""
        return _Summed.apply(vectors, self.group)  # type: ignore[no-any-return]

    def shared(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden`, which all ranks have: its gradient is the sum of theirs. Collective."""
        return _Shared.apply(hidden, self.group)  # type: ignore[no-any-return]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        total = vectors.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


def words_of(weight: torch.Tensor) -> Words | None:
    """Return this rank's words, if tensor ranks have a part of the rows of a table or head each."""
    names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    if "tensor" not in names:
        return None
    assert isinstance(weight, DTensor)
    mesh, axis = weight.device_mesh, names.index("tensor")
    size, rank, total = mesh.size(axis), mesh.get_local_rank(axis), len(weight)
    most = -(-total // size)
    first = most * rank
    return Words(total, first, min(first + most, total), most, mesh.get_group(axis))


def words_of_head(head: nn.Module) -> Words | None:
    """Return this rank's words of an output head, which an adapter may wrap; None: it has all."""
    return next(filter(None, map(words_of, head.parameters())), None)
