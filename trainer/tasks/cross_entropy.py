"""Summed cross-entropy that never holds all logits in float32 (contract 8).

Gradients are made in the forward pass, chunk by chunk, and scaled in the backward pass, as Liger kernels
do (arXiv 2410.10989): what lives is one chunk of logits, not `[tokens, vocabulary]`.

Shapes: n tokens, h hidden size, v vocabulary. Targets of -100 are not counted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100
CHUNK_BYTES = 64 << 20
"""Least size of one chunk of float32 logits: large enough for full speed, small beside any model."""


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Sum over the tokens of -log softmax(hidden @ weight.T + bias)[target], in nats, float32 or wider.

    hidden [..., h], weight [v, h], bias [v], targets [...].
    """
    flat, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    return _LinearCrossEntropy.apply(flat, weight, bias, flat_targets, torch.is_grad_enabled())  # type: ignore[no-any-return]


def logits_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same from logits [..., v] that a model has made itself; only a chunk at a time becomes float32."""
    flat, flat_targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    return _LogitsCrossEntropy.apply(flat, flat_targets, torch.is_grad_enabled())  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        with_gradients: bool,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        wants_hidden = with_gradients and ctx.needs_input_grad[0]
        wants_weight = with_gradients and ctx.needs_input_grad[1]
        wants_bias = with_gradients and bias is not None and ctx.needs_input_grad[2]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # summed over chunks in full precision, rounded once at the end
        weight_grad = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        bias_grad = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        # each chunk passes over the whole weight gradient: with h / 2 rows its product costs more than that
        for rows in _chunks(hidden.shape[0], weight.shape[0], wide, at_least=hidden.shape[1] // 2):
            part = hidden[rows]
            loss, grad = _chunk_loss(F.linear(part, weight, bias).to(wide), targets[rows])
            total += loss
            low = grad.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(low, weight, out=hidden_grad[rows])
            if weight_grad is not None:
                if low.dtype == wide:
                    weight_grad.addmm_(low.T, part)
                else:
                    weight_grad += low.T @ part
            if bias_grad is not None:
                bias_grad += grad.sum(0)
        ctx.save_for_backward(
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None or bias is None else bias_grad.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        scaled = [None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*scaled, None, None)


class _LogitsCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, with_gradients: bool) -> torch.Tensor:  # type: ignore[override]
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        gradient = torch.empty_like(logits) if with_gradients and ctx.needs_input_grad[0] else None
        for rows in _chunks(logits.shape[0], logits.shape[1], wide):
            loss, grad = _chunk_loss(logits[rows].to(wide, copy=True), targets[rows])
            total += loss
            if gradient is not None:
                gradient[rows] = grad
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None


def _chunks(tokens: int, vocabulary: int, dtype: torch.dtype, at_least: int = 1) -> list[slice]:
    size = max(at_least, CHUNK_BYTES // (vocabulary * dtype.itemsize))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of one chunk, and its gradient by the logits, made in the logits' own memory. [n, v], [n]."""
    counted = targets != IGNORED
    index = targets.clamp_min(0).unsqueeze(1)
    log_total = torch.logsumexp(logits, dim=1, keepdim=True)
    loss = torch.where(counted, (log_total - logits.gather(1, index)).squeeze(1), 0).sum()
    grad = logits.sub_(log_total).exp_()
    grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))
    return loss, grad.mul_(counted.unsqueeze(1))


class LossHead(nn.Linear):
    """An output head that, given targets, returns the summed loss in place of logits.

    Stands where the model's own head stood, with its parameters and its name, so that whoever gathers
    parameters around a module call (ZeRO-3, FSDP) does so around the loss.
    """

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        if targets is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, self.bias, targets)
