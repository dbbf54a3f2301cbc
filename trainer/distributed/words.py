"""A vocabulary split over tensor ranks: each has the logits of its words alone (Megatron-LM, arXiv
1909.08053, section 3).

Shapes: n tokens, v words on this rank, t ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.exchange import Exchange


@dataclass(frozen=True)
class Words:
    """The words of this rank, of a vocabulary that the ranks of a group have together."""

    total: int
    start: int
    stop: int
    most: int
    """The most words of a rank."""
    ranks: Exchange

    def find(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of tokens in this rank's part, 0 for others', and which are its own."""
        own = (tokens >= self.start) & (tokens < self.stop)
        return (tokens - self.start).where(own, 0), own

    def gathered(self, *values: torch.Tensor) -> torch.Tensor:
        """Return values [n] of all ranks: [values, t, n]. Collective."""
        return self.ranks.join(torch.stack(values)[:, None], 1, self.ranks.group.size())

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the number of the word with the highest of all ranks' logits: the first of equal
        ones. Collective.
        """
        highest, index = logits.double().max(-1)  # float64 holds both exactly
        values, words = self.gathered(highest, (index + self.start).double())
        return words.gather(0, values.argmax(0, keepdim=True))[0].long()


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
    return Words(total, first, min(first + most, total), most, Exchange(mesh.get_group(axis)))


def words_of_head(head: nn.Module) -> Words | None:
    """Return this rank's words of an output head, which an adapter may wrap; None: it has all."""
    return next(filter(None, map(words_of, head.parameters())), None)
