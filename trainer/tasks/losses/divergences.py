"""Divergences of a student from a teacher of whom the likeliest tokens are known, summed, with one
chunk of logits in memory at a time.

Of a token, T is the temperature, p the teacher's distribution softmax(logits / T), and q the
student's. Known are the teacher's k likeliest tokens K, with log p of each, and of all other tokens
together. Both distributions are compared over k + 1 outcomes: the tokens of K, and "any other
token", whose probability is the sum over all tokens outside of K (a tail bucket, as in TRL 1.16's
`server_distillation`). So D is never larger than over the whole vocabulary (the data-processing
inequality), and equal to it if K is all of it.

    forward         D = sum of p (log p - log q)                        (arXiv 1503.02531, 2)
    reverse         D = sum of q (log q - log p)                        (arXiv 2306.08543, 2.1)
    jensen_shannon  D = b sum of p (log p - log m) + (1 - b) sum of q (log q - log m),
                    m = b p + (1 - b) q                                 (arXiv 2306.13649, 1)

The loss of a token is (1 - w) T^2 D + w (-log q_1[target]), where q_1 is at temperature 1; T^2
keeps the size of the gradients (arXiv 1503.02531, section 2). Gradients are computed in the forward
pass.

Shapes: n tokens, h hidden size, v vocabulary, k tokens of the teacher. A target of -100 is not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from trainer.distributed.autograd import differentiable_once
from trainer.distributed.dtensor import local
from trainer.distributed.exchange import VocabularyShard, vocabulary_shard_of
from trainer.tasks.losses.chunks import (
    AutogradContext,
    ChunkGradients,
    chunk_logits,
    product_chunks,
    times,
)
from trainer.tasks.losses.cross_entropy import LossObserver, chunk_loss
from trainer.tasks.task import IGNORED

Divergence = Literal["forward", "reverse", "jensen_shannon"]
SUMS = 4
"""The sums that are returned: of losses, -log q_1[target], D, and the teacher's share of K."""


@dataclass(frozen=True)
class Mixed:
    """The settings of the loss."""

    divergence: Divergence = "forward"
    beta: float = 0.5
    """b of `jensen_shannon`."""
    temperature: float = 1.0
    hard_weight: float = 0.0
    """The weight w of the target's cross-entropy."""
    smoothing: float = 0.0
    """The share of a target that is spread evenly over all v."""
    observe: LossObserver | None = None
    """Called with each token's loss."""


class Likeliest(NamedTuple):
    """A teacher's likeliest tokens at some positions."""

    ids: torch.Tensor
    """int64 or int32 [n, k], different ones at each position."""
    logs: torch.Tensor
    """log p of each, and of all other tokens together: [n, k + 1]; -inf if there are no others."""

    def at(self, rows: slice | torch.Tensor) -> Likeliest:
        return Likeliest(self.ids[rows], self.logs[rows])


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    teacher: Likeliest,
    mixed: Mixed,
) -> torch.Tensor:
    """Return sums over the tokens, float32 or wider [SUMS]; only the first has a gradient.

    hidden [..., h], weight [v, h], bias [v], targets [...], `teacher` of all targets in that order.
    Of a weight that is split over tensor ranks, each computes its own logits.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    shard = vocabulary_shard_of(weight)
    flat = flat if shard is None else shard.ranks.copy_to(flat)
    own = local(weight), None if bias is None else local(bias)
    call = _DivergenceCall(mixed, teacher, torch.is_grad_enabled(), shard)
    return _Mixed.apply(flat, *own, targets.reshape(-1), call)  # type: ignore[no-any-return]


def logits_divergence(
    logits: torch.Tensor,
    targets: torch.Tensor,
    teacher: Likeliest,
    mixed: Mixed,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Return the sums from logits [..., v]: those of this rank's `shard`; None: of all."""
    flat = logits.reshape(-1, logits.shape[-1])
    call = _DivergenceCall(mixed, teacher, torch.is_grad_enabled(), shard)
    return _Mixed.apply(flat, None, None, targets.reshape(-1), call)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _DivergenceCall:
    """The arguments of the loss besides its tensors with gradients."""

    mixed: Mixed
    teacher: Likeliest
    with_gradients: bool
    shard: VocabularyShard | None


class _Mixed(torch.autograd.Function):
    """The sums of hidden states [n, h] or, without a weight, of logits [n, v]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: AutogradContext,
        given: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        call: _DivergenceCall,
    ) -> torch.Tensor:
        wide = torch.promote_types(given.dtype, torch.float32)
        sums = torch.zeros(SUMS, dtype=torch.float64, device=given.device)
        needed = ctx.needs_input_grad[:3] if call.with_gradients else [False] * 3
        gradients = ChunkGradients(given, weight, bias, wide, needed)
        for rows in product_chunks(given, weight, call.shard, wide):
            part = given[rows]
            logits = chunk_logits(part, weight, bias, wide)
            each, grad = _chunk(logits, targets[rows], call.teacher.at(rows), call)
            sums += each.sum(1)
            if call.mixed.observe is not None:
                call.mixed.observe(rows, each[0])
            gradients.add(rows, part, grad)
        ctx.save_for_backward(*gradients.whole())
        return sums.to(wide)

    @staticmethod
    @differentiable_once("the divergence")
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> object:  # type: ignore[override]
        scaled = [None if one is None else times(one, grad[0]) for one in ctx.saved_tensors]
        return (*scaled, None, None)


def _chunk(
    logits: torch.Tensor, targets: torch.Tensor, teacher: Likeliest, call: _DivergenceCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's values [SUMS, n], float64, and the gradient of its losses [n, v]."""
    mixed = call.mixed
    counted = targets != IGNORED
    t = mixed.temperature
    copy = logits.clone()
    hard, hard_grad = chunk_loss(copy, targets, logits.dtype, mixed.smoothing, call.shard)
    logs = teacher.logs.double()
    outcomes = _Outcomes.of(logits.div_(t), teacher.ids.long(), call.shard)
    soft, ratio = DIVERGENCES[mixed.divergence](logs, outcomes.logs, mixed.beta)
    scale = counted.double() * ((1 - mixed.hard_weight) * t * t)
    losses = scale * soft + mixed.hard_weight * hard.double()
    share = -torch.expm1(logs[:, -1])
    each = torch.stack([losses, hard.double(), soft, share]).where(counted, 0.0)
    grad = outcomes.gradient(ratio * (scale / t).unsqueeze(1))
    if mixed.hard_weight:
        grad.add_(hard_grad, alpha=mixed.hard_weight)
    return each, grad


@dataclass
class _Outcomes:
    """The student's log q of the teacher's tokens and of all others, and its gradient's parts."""

    logs: torch.Tensor
    """log q, float64 [n, k + 1]."""
    others: torch.Tensor
    """exp(logits - largest) of this rank's tokens outside of K, 0 for those of K, [n, v]."""
    largest: torch.Tensor
    """The largest of those logits, float64 [n, 1]."""
    total: torch.Tensor
    """log sum exp over all tokens outside of K, float64 [n, 1]."""
    index: torch.Tensor
    own: torch.Tensor
    """The places of K's tokens among this rank's logits, and which of them it has, [n, k]."""

    @classmethod
    def of(
        cls, logits: torch.Tensor, ids: torch.Tensor, shard: VocabularyShard | None
    ) -> _Outcomes:
        """Take a chunk's logits [n, v], whose memory becomes `others`."""
        index = ids
        own = torch.ones_like(ids, dtype=torch.bool)
        if shard is not None:
            index, own = shard.find(ids)
        wanted = logits.gather(1, index).double().where(own, 0.0)
        # a token that this rank does not have stands for its first, to which 0 is added
        ruled_out = torch.zeros_like(wanted, dtype=logits.dtype).masked_fill_(own, -math.inf)
        logits.scatter_add_(1, index, ruled_out)
        # all may be ruled out, by being in K or by logits of minus infinity
        largest = logits.amax(1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
        others = logits.sub_(largest).exp_()
        total = others.sum(1, keepdim=True).double().log() + largest.double()
        if shard is not None:
            both = torch.cat([wanted, total], 1)[None]
            every = shard.ranks.gather(both, 0, shard.ranks.group.size())
            wanted = every[..., :-1].sum(0)
            total = torch.logsumexp(every[..., -1:], 0)
        every_log = torch.cat([wanted, total], 1)
        logs = every_log - torch.logsumexp(every_log, 1, keepdim=True)
        return cls(logs, others, largest.double(), total, index, own)

    def gradient(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits, in the memory of `others`, from q dD/dq [n, k + 1]."""
        inner = ratio - self.logs.exp() * ratio.sum(1, keepdim=True)
        # of a token outside of K: its share of what they have together
        factor = (self.largest - self.total).exp() * inner[:, -1:]
        factor = factor.where(self.total > -math.inf, 0.0)
        grad = self.others.mul_(factor.to(self.others.dtype))
        of_likeliest = inner[:, :-1].where(self.own, 0.0).to(grad.dtype)
        return grad.scatter_add_(1, self.index, of_likeliest)


def _times(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Multiply, where a weight of 0 gives 0 whatever the value is."""
    return torch.where(weight > 0, weight * value, 0.0)


Computed = tuple[torch.Tensor, torch.Tensor]
"""D [n], and q dD/dq [n, k + 1], of log p and log q [n, k + 1]."""


def _forward(p: torch.Tensor, q: torch.Tensor, beta: float) -> Computed:
    return _times(p.exp(), p - q).sum(1), -p.exp()


def _reverse(p: torch.Tensor, q: torch.Tensor, beta: float) -> Computed:
    each = _times(q.exp(), q - p)
    return each.sum(1), each + q.exp()


def _jensen_shannon(p: torch.Tensor, q: torch.Tensor, beta: float) -> Computed:
    m = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    of_student = (1 - beta) * _times(q.exp(), q - m)
    return (beta * _times(p.exp(), p - m) + of_student).sum(1), of_student


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor, float], Computed]] = {
    "forward": _forward,
    "reverse": _reverse,
    "jensen_shannon": _jensen_shannon,
}


def linear_likeliest(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    count: int,
    vocabulary: int,
    temperature: float,
) -> torch.Tensor:
    """Return a teacher's likeliest tokens among the first `vocabulary` ids, and their log p.

    hidden [n, h]; the result is float64 [n, 2 count + 1]: ids, log p of each, log p of all others.
    """
    shard = vocabulary_shard_of(weight)
    weight = local(weight)
    bias = None if bias is None else local(bias)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = []
    for rows in product_chunks(hidden, weight, shard, wide):
        logits = F.linear(hidden[rows], weight, bias).to(wide)
        parts.append(logits_likeliest(logits, count, vocabulary, temperature, shard))
    return torch.cat(parts)


def logits_likeliest(
    logits: torch.Tensor,
    count: int,
    vocabulary: int,
    temperature: float,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Return the same from logits [n, v]: those of this rank's `shard`; None: of all."""
    start = 0 if shard is None else shard.start
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    known = scaled[:, : max(0, vocabulary - start)]
    values, ids = known.topk(min(count, known.shape[1]), 1)
    values = values.double()
    ids = ids.double() + start
    if shard is not None:
        missing = count - values.shape[1]
        both = torch.stack([F.pad(values, (0, missing), value=-math.inf), F.pad(ids, (0, missing))])
        every = shard.ranks.gather(both[None], 0, shard.ranks.group.size())
        values, ids = every.transpose(0, 1).movedim(1, 2).flatten(2)
        values, best = values.topk(count, 1)
        ids = ids.gather(1, best)
    logs = _Outcomes.of(scaled.clone(), ids.long(), shard).logs
    return torch.cat([ids, logs], 1)
