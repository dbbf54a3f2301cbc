"""The cross-entropy of each token, differentiable, with one chunk of logits in memory at a time.

Unlike the sum (`cross_entropy.py`), whose gradient is computed in the forward pass, each
token's loss may have another gradient: that of a loss of whole sequences. So the logits of a chunk
are computed once more in the backward pass, from the hidden states; what is kept of the forward
pass is a number a token, the logarithm of its total.

Shapes: n tokens, h hidden size, v vocabulary. The loss of a target of -100 is 0.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from trainer.distributed.autograd import differentiable_once
from trainer.distributed.dtensor import local
from trainer.distributed.exchange import VocabularyShard, vocabulary_shard_of
from trainer.tasks.losses.chunks import (
    AutogradContext,
    ChunkGradients,
    chunk_logits,
    product_chunks,
)
from trainer.tasks.losses.cross_entropy import NO_OPTIONS, LossHead
from trainer.tasks.task import IGNORED


def linear_token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return -log softmax(hidden @ weight.T + bias)[target] of each token, in nats.

    hidden [..., h], weight [v, h], bias [v], targets [...]; the result has the shape of `targets`,
    and is float32 or wider. Of a weight that is split over tensor ranks, each computes its own
    logits.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    shard = vocabulary_shard_of(weight)
    flat = flat if shard is None else shard.ranks.copy_to(flat)
    own = local(weight), None if bias is None else local(bias)
    losses: torch.Tensor = _TokenLosses.apply(flat, *own, targets.reshape(-1), shard)
    return losses.view_as(targets)


def logits_token_losses(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard | None = None
) -> torch.Tensor:
    """Return the same from logits [..., v]: those of this rank's `shard`; None: of all."""
    flat = logits.reshape(-1, logits.shape[-1])
    losses: torch.Tensor = _TokenLosses.apply(flat, None, None, targets.reshape(-1), shard)
    return losses.view_as(targets)


class TokenLossHead(LossHead):
    """An output head that, given targets, returns the loss of each of them instead of logits."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head, NO_OPTIONS)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        targets = self._targets if targets is None else targets
        if targets is None:
            return super().forward(hidden)
        return linear_token_losses(hidden, self.weight, self.bias, targets)


class _TokenContext(AutogradContext, Protocol):
    parts: list[slice]
    """The chunks of tokens."""
    shard: VocabularyShard | None


class _TokenLosses(torch.autograd.Function):
    """The losses [n] of hidden states [n, h] or, without a weight, of logits [n, v]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _TokenContext,
        given: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        shard: VocabularyShard | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(given.dtype, torch.float32)
        losses = torch.empty(len(given), dtype=wide, device=given.device)
        log_totals = torch.empty_like(losses)
        ctx.parts = product_chunks(given, weight, shard, wide)
        ctx.shard = shard
        for rows in ctx.parts:
            logits = chunk_logits(given[rows], weight, bias, wide)
            log_total, wanted = _log_total(logits, targets[rows], shard)
            log_totals[rows] = log_total
            losses[rows] = torch.where(targets[rows] != IGNORED, log_total - wanted, 0)
        ctx.save_for_backward(given, weight, bias, targets, log_totals)
        return losses

    @staticmethod
    @differentiable_once("the losses of tokens")
    def backward(ctx: _TokenContext, gradient: torch.Tensor) -> object:  # type: ignore[override]
        given, weight, bias, targets, log_totals = ctx.saved_tensors
        wide = log_totals.dtype
        gradients = ChunkGradients(given, weight, bias, wide, ctx.needs_input_grad[:3])
        scale = torch.where(targets != IGNORED, gradient, 0).to(wide).unsqueeze(1)
        for rows in ctx.parts:
            part = given[rows]
            grad = chunk_logits(part, weight, bias, wide)
            grad.sub_(log_totals[rows].unsqueeze(1)).exp_().mul_(scale[rows])
            index, own = _place(targets[rows], ctx.shard)
            target = torch.where(own.unsqueeze(1), -scale[rows], 0)
            grad.scatter_add_(1, index.unsqueeze(1), target)
            gradients.add(rows, part, grad)
        return (*gradients.whole(), None, None)


def _place(
    targets: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the targets among this rank's logits, and which of them it has."""
    index = targets.clamp_min(0)
    counted = targets != IGNORED
    if shard is None:
        return index, counted
    index, own = shard.find(index)
    return index, own & counted


def _log_total(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log sum exp of all ranks' logits, and the targets' logits, both [n]."""
    index, own = _place(targets, shard)
    wanted = logits.gather(1, index.unsqueeze(1)).squeeze(1).where(own, 0)
    # this rank's tokens may all be ruled out, by logits of minus infinity
    largest = logits.amax(1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    log_total = (logits - largest).exp_().sum(1).log() + largest.squeeze(1)
    if shard is None:
        return log_total, wanted
    log_totals, parts = shard.gathered(log_total, wanted)
    return torch.logsumexp(log_totals, 0), parts.sum(0)
