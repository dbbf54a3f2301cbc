"""The loss over all samples of a step, and its gradient with respect to each of their vectors.

InfoNCE (arXiv 1807.03748), as sentence-transformers' MultipleNegativesRankingLoss has it: with
similarities s of anchor i and document j, times `scale`,

    loss_i = log sum_j exp(s_ij) - s_ii,

over all positives and negatives of the step. `symmetric` takes the mean of this and of the same
from positive i over all anchors. By GradCache (arXiv 2101.06983) only the vectors have to be in
memory together, which this file sees alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import normalize

BYTES = 1 << 26
"""The memory for the similarities of some anchors with all documents."""


class Vectors(NamedTuple):
    """The vectors of samples, and what is known of their texts."""

    vectors: torch.Tensor
    """Anchor, positive and negatives of each sample: float32 [samples, columns, width]."""
    texts: torch.Tensor
    """Digests of them: int64 [samples, columns]."""
    real: torch.Tensor
    """True for a sample that counts: bool [samples]."""

    def gathered(self, group: dist.ProcessGroup | None) -> Vectors:
        """Return those of all ranks of a group, in their order. Collective."""
        return Vectors(*(_gathered(part, group) for part in self))


@dataclass(frozen=True)
class Contrast:
    """The options of the loss."""

    scale: float = 20.0
    cosine: bool = True
    symmetric: bool = False
    masks: bool = True
    """True if other right answers are no negatives."""

    def losses(self, every: Vectors, rows: slice) -> torch.Tensor:
        """Return the loss of some samples among all, [rows]; 0 for one that is not real."""
        vectors = normalize(every.vectors, dim=-1) if self.cosine else every.vectors
        wanted = _wanted(rows, len(vectors), vectors.device)
        right = _right_documents(every, rows) if self.masks else None
        scores = self._scores(vectors[rows, 0], vectors[:, 1:].flatten(0, 1), every, right, wanted)
        own = scores.gather(1, (wanted * (vectors.shape[1] - 1))[:, None])[:, 0]
        total = scores.logsumexp(1)
        if self.symmetric:
            right = _right_anchors(every, rows) if self.masks else None
            back = self._scores(vectors[rows, 1], vectors[:, 0], every, right, wanted)
            total = (total + back.logsumexp(1)) / 2
        return (total - own).where(every.real[rows], 0.0)

    def _scores(
        self,
        ours: torch.Tensor,
        others: torch.Tensor,
        every: Vectors,
        right: torch.Tensor | None,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Return scaled similarities [rows, others], -inf for those that are no negatives."""
        scores = self.scale * (ours @ others.T)
        columns = len(others) // len(every.real)
        out = ~every.real.repeat_interleave(columns)[None].expand_as(scores)
        if right is not None:
            out = out | right
        return scores.masked_fill(out.scatter(1, (wanted * columns)[:, None], False), -torch.inf)

    def ranks(self, every: Vectors, rows: slice) -> torch.Tensor:
        """Return the place of each positive among all documents by their scores, from 1: [rows].

        A document that scores as high counts as higher. Other right answers do not count.
        """
        vectors = normalize(every.vectors, dim=-1) if self.cosine else every.vectors
        wanted = _wanted(rows, len(vectors), vectors.device)
        right = _right_documents(every, rows) if self.masks else None
        scores = self._scores(vectors[rows, 0], vectors[:, 1:].flatten(0, 1), every, right, wanted)
        own = scores.gather(1, (wanted * (vectors.shape[1] - 1))[:, None])
        return (scores >= own).sum(1)

    def chunks(self, every: Vectors, first: int, count: int) -> list[slice]:
        """Return the rows from `first` on in parts whose similarities fit into memory."""
        documents = every.vectors.shape[0] * (every.vectors.shape[1] - 1)
        size = max(1, BYTES // (4 * max(1, documents)))
        ends = range(first, first + count, size)
        return [slice(start, min(start + size, first + count)) for start in ends]

    def gradients(
        self, own: Vectors, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each own sample's loss among all [samples], and the gradient of the sum of all
        ranks' losses with respect to own vectors [samples, columns, width]. Collective."""
        every = own.gathered(group)
        rank = dist.get_rank(group) if group is not None else 0
        first = rank * len(own.vectors)
        vectors = every.vectors.detach().requires_grad_()
        losses = []
        for rows in self.chunks(every, first, len(own.vectors)):
            with torch.enable_grad():
                part = self.losses(every._replace(vectors=vectors), rows)
                part.sum().backward()
            losses.append(part.detach())
        assert vectors.grad is not None
        gradient = vectors.grad
        if group is not None:
            dist.all_reduce(gradient, group=group)
        return torch.cat(losses), gradient[first : first + len(own.vectors)].clone()


def _wanted(rows: slice, size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device)[rows]


def _right_documents(every: Vectors, rows: slice) -> torch.Tensor:
    """Return which documents are right answers to some anchors: bool [rows, documents].

    They have the text of the anchor's own positive or of the anchor, or are the positive of an
    equal anchor.
    """
    anchors = every.texts[:, 0]
    documents = every.texts[:, 1:]
    own = every.texts[rows]
    right = (own[:, 1, None, None] == documents) | (own[:, 0, None, None] == documents)
    right[:, :, 0] |= own[:, :1] == anchors
    return right.flatten(1)


def _right_anchors(every: Vectors, rows: slice) -> torch.Tensor:
    """Return which anchors some positives are right answers to: bool [rows, anchors]."""
    own = every.texts[rows]
    anchors = every.texts[:, 0]
    positives = every.texts[:, 1]
    same = (own[:, :1] == anchors) | (own[:, 1:2] == positives)
    return same | (own[:, 1:2] == anchors)


def _gathered(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None:
        return part
    sent = part.to(torch.uint8) if part.dtype == torch.bool else part
    every = sent.new_empty(group.size() * len(sent), *sent.shape[1:])
    dist.all_gather_into_tensor(every, sent.contiguous(), group=group)
    return every.to(part.dtype)
