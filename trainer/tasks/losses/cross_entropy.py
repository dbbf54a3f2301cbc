"""Summed cross-entropy that never holds all logits in float32.

Gradients are computed in the forward pass, chunk by chunk, and scaled in the backward pass, as in
Liger kernels (arXiv 2410.10989): memory holds one chunk of logits, not `[tokens, vocabulary]`.

Shapes: n tokens, h hidden size, v vocabulary. Targets of -100 are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.autograd import differentiable_once
from trainer.distributed.dtensor import local
from trainer.distributed.exchange import VocabularyShard, vocabulary_shard_of
from trainer.tasks.losses.chunks import (
    AutogradContext,
    Cast,
    ChunkGradients,
    Compiler,
    chunk_logits,
    product_chunks,
    times,
)
from trainer.tasks.task import IGNORED, Batch

LossObserver = Callable[[slice, torch.Tensor], None]
"""Called with a range of tokens and their losses."""
ChunkLoss = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`chunk_loss`, or the same compiled."""


@dataclass(frozen=True)
class LossOptions:
    """The arguments of the loss that a caller may leave out."""

    smoothing: float = 0.0
    """The share of each target that is spread evenly over all v, as by PyTorch's `label_smoothing`
    (arXiv 1512.00567, section 7)."""
    observe: LossObserver | None = None
    """Called with each token's loss."""
    chunk_loss: ChunkLoss | None = None
    """None: as it stands, uncompiled."""
    cast: Cast | None = None
    """Casts the matrix by which chunks are multiplied; None: it stays as it is."""

    def report(self, rows: slice, losses: torch.Tensor) -> None:
        if self.observe is not None:
            self.observe(rows, losses)


NO_OPTIONS = LossOptions()


@dataclass(frozen=True)
class _NoTensors:
    """The arguments of the loss besides its tensors."""

    options: LossOptions
    with_gradients: bool
    shard: VocabularyShard | None
    """This rank's part of the vocabulary; None: all."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: LossOptions = NO_OPTIONS,
) -> torch.Tensor:
    """Return the sum over the tokens of -log softmax(hidden @ weight.T + bias)[target], in nats,
    float32 or wider.

    hidden [..., h], weight [v, h], bias [v], targets [...]. Of a weight that is split over tensor
    ranks, each computes its own logits.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat_targets = targets.reshape(-1)
    shard = vocabulary_shard_of(weight)
    flat = flat if shard is None else shard.ranks.copy_to(flat)
    own = local(weight), None if bias is None else local(bias)
    call = _NoTensors(options, torch.is_grad_enabled(), shard)
    return _CrossEntropy.apply(flat, *own, flat_targets, call)  # type: ignore[no-any-return]


def linear_measured(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    cast: Cast | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same sum, and the number of targets with the highest logit; without gradients."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat_targets = targets.reshape(-1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    shard = vocabulary_shard_of(weight)
    weight = local(weight)
    bias = None if bias is None else local(bias)
    matrix = None if cast is None else cast(weight)
    for rows in product_chunks(flat, weight, shard, wide):
        logits = chunk_logits(flat[rows], weight, bias, matrix=matrix)
        correct += count_correct(logits, flat_targets[rows], shard)
        total += chunk_loss(logits, flat_targets[rows], wide, shard=shard)[0].sum()
    return total, correct


def count_correct(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard | None = None
) -> torch.Tensor:
    """Count the targets [...] with the highest of the logits [..., v]: the first of equal ones."""
    best = logits.argmax(-1) if shard is None else shard.likeliest(logits)
    return ((best == targets) & (targets != IGNORED)).sum()


def logits_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions = NO_OPTIONS,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Return the same sum from logits [..., v], of which only a chunk at a time becomes float32.

    They are those of this rank's `shard`; None: of the whole vocabulary.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    flat_targets = targets.reshape(-1)
    call = _NoTensors(options, torch.is_grad_enabled(), shard)
    return _CrossEntropy.apply(flat, None, None, flat_targets, call)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """The summed loss of hidden states [n, h] or, without a weight, of logits [n, v]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: AutogradContext,
        given: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        call: _NoTensors,
    ) -> torch.Tensor:
        wide = torch.promote_types(given.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=given.device)
        needed = ctx.needs_input_grad[:3] if call.with_gradients else [False] * 3
        gradients = ChunkGradients(given, weight, bias, wide, needed)
        options = call.options
        shard = call.shard
        loss_of = options.chunk_loss if shard is None else None
        dtype = gradients.of_logits
        logit_bytes = given.dtype.itemsize + dtype.itemsize if loss_of else None
        matrix = options.cast(weight) if options.cast and weight is not None else None
        for rows in product_chunks(given, weight, shard, wide, logit_bytes):
            part = given[rows]
            losses, grad = (loss_of or chunk_loss)(
                chunk_logits(part, weight, bias, matrix=matrix),
                targets[rows],
                dtype,
                options.smoothing,
                shard,
            )
            total += losses.sum()
            options.report(rows, losses)
            gradients.add(rows, part, grad, matrix)
            del grad  # before the next chunk's logits
        ctx.save_for_backward(*gradients.whole())
        return total

    @staticmethod
    @differentiable_once("the cross-entropy")
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> object:  # type: ignore[override]
        scaled = [None if saved is None else times(saved, grad) for saved in ctx.saved_tensors]
        return (*scaled, None, None)


def chunk_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype,
    smoothing: float = 0.0,
    shard: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's losses [n], float32 or wider, and the gradient of their sum [n, v].

    The gradient is computed as the losses are, and then rounded to `dtype`. It may take the memory
    of the logits. Compiled, this is one kernel, which reads the logits twice and writes no more
    than the gradient.
    """
    counted = targets != IGNORED
    index = targets.clamp_min(0)
    index, own = (index, counted) if shard is None else shard.find(index)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wanted = wide.gather(1, index.unsqueeze(1)).squeeze(1).where(own, 0)
    total = logits.shape[1] if shard is None else shard.total
    if smoothing:
        wanted = (1 - smoothing) * wanted + smoothing / total * wide.sum(1)
    largest = wide.amax(1, keepdim=True)
    if shard is not None:  # this rank's tokens may all be ruled out, by logits of minus infinity
        largest = largest.clamp_min(torch.finfo(largest.dtype).min)
    grad = _minus(wide, largest).exp_()
    log_total = (grad.sum(1, keepdim=True).log() + largest).squeeze(1)
    if shard is not None:
        log_totals, parts = shard.gathered(log_total, wanted)
        log_total = torch.logsumexp(log_totals, 0)
        wanted = parts.sum(0)
    losses = torch.where(counted, log_total - wanted, 0)
    grad.mul_((largest - log_total.unsqueeze(1)).exp() * counted.unsqueeze(1))
    if smoothing:
        grad.sub_(smoothing / total * counted.unsqueeze(1))
    target = (smoothing - 1) * (counted & own).to(grad.dtype)
    return losses, _plus_at(grad, index.unsqueeze(1), target.unsqueeze(1)).to(dtype)


def _minus(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Subtract; uncompiled in place, which takes 0.7 of the time and half of the memory.

    Compiled code would write the logits' memory once more.
    """
    return logits - largest if torch.compiler.is_compiling() else logits.sub_(largest)


def _plus_at(grad: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Add a value [n, 1] to a number of each row of the gradient [n, v], at `index` [n, 1].

    By a comparison of each column's number in compiled code, which makes it part of what computes
    the gradient. Uncompiled that would take three times as long as to add in place.
    """
    if not torch.compiler.is_compiling():
        return grad.scatter_add_(1, index, value)
    columns = torch.arange(grad.shape[1], device=grad.device)
    return grad + torch.where(columns == index, value, 0)


class LossHead(nn.Linear):
    """An output head that, given targets, returns the summed loss instead of logits.

    It stands in the place of the model's own head, with its parameters and under its name, so that
    hooks that gather parameters around a module call (ZeRO-3, FSDP) do so around the loss.
    """

    def __init__(self, head: nn.Linear, options: LossOptions) -> None:
        """Take over all that `head` holds; the options apply in training."""
        vars(self).update(vars(head))
        self._in_training = options
        self._targets: torch.Tensor | None = None
        self._correct: torch.Tensor | None = None
        self._chunk_loss: ChunkLoss | None = None
        self._cast: Cast | None = None

    def multiply_by(self, cast: Cast) -> None:
        """Have the loss cast the matrix; logits that are returned are computed as before."""
        self._cast = cast

    def compute_chunks_by(self, compiled: Compiler) -> None:
        """Have each chunk's loss, gradient and products with a cast matrix computed by compiled
        code."""
        self._chunk_loss = compiled(chunk_loss, of_tokens=2)
        if self._cast is not None:
            self._cast = self._cast.compiled(compiled)

    @contextmanager
    def given(self, targets: torch.Tensor) -> Iterator[None]:
        """Return the loss for `targets` to a caller that passes none: a model's own forward."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def take_correct(self) -> torch.Tensor:
        """Return, and forget, how many of the last targets had the highest logit."""
        correct = self._correct
        self._correct = None
        assert correct is not None
        return correct

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        targets = self._targets if targets is None else targets
        if targets is None:
            return super().forward(hidden)
        if self.training or torch.is_grad_enabled():
            options = self._in_training if self.training else NO_OPTIONS
            options = replace(options, chunk_loss=self._chunk_loss, cast=self._cast)
            return linear_cross_entropy(hidden, self.weight, self.bias, targets, options)
        own = hidden, self.weight, self.bias, targets
        loss, self._correct = linear_measured(*own, self._cast)
        return loss


class LossBySource:
    """Sums of losses and numbers of targets, by the number of the source of each sample."""

    def __init__(self, sources: int, device: torch.device | None = None) -> None:
        self._sums = torch.zeros(2, sources, dtype=torch.float64, device=device)
        self._of = self._counts = torch.empty(0)

    def start(self, batch: Batch) -> None:
        """Take what is added next for the losses of `batch`, which has `sources` [batch, 1]."""
        targets = batch["targets"]
        self._of = batch["sources"].expand_as(targets).flatten()
        self._counts = (targets != IGNORED).flatten()
        self._sums = self._sums.to(targets.device)

    def add(self, rows: slice, losses: torch.Tensor) -> None:
        """Add the losses of some of its tokens, [n], 0 without a target."""
        sums = torch.stack([losses, self._counts[rows].to(losses.dtype)]).double()
        self._sums.index_add_(1, self._of[rows], sums)

    def take(self, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
        """Return the sums since the last call, [2, sources], over a group. Collective."""
        sums = self._sums.to(device)
        self._sums = torch.zeros_like(self._sums)
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums
