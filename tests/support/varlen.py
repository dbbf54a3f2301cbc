"""PyTorch's attention within borders on the CPU: its operators get kernels by their definition.

All else is PyTorch's own: the checks of its arguments, autograd, what `torch.compile` sees.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention import varlen


def shares(query: Any, key: Any, cuts: Any, scale: Any, window: Any) -> torch.Tensor:
    """Return the softmax of the scores, [heads, tokens, tokens], zero outside of a sequence."""
    at = torch.arange(len(query))
    number = torch.searchsorted(cuts.long(), at, right=True)
    ages = at[:, None] - at
    seen = (ages >= 0) & (number[:, None] == number)
    seen &= (ages <= window[0]) if window[0] >= 0 else True
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def wide(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Repeat key or value heads for each query head."""
    return part.repeat_interleave(like.shape[1] // part.shape[1], 1)


def forward(
    query: Any, key: Any, value: Any, cuts: Any, cuts_k: Any, max_q: int, max_k: int, *more: Any
) -> Any:
    _, scale, window = more[:3]
    assert max_q == max_k >= int(cuts.diff().max()) and cuts.dtype == torch.int32
    assert torch.equal(cuts, cuts_k) and int(cuts[-1]) == len(query) and window[1] == 0
    share = shares(query, wide(key, query), cuts, scale, window)
    out = torch.einsum("hqk,khd->qhd", share, wide(value, query))
    out = torch.empty_like(query).copy_(out)  # its layout is stated for compilers
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def backward(grad: Any, query: Any, key: Any, value: Any, out: Any, *rest: Any) -> Any:
    cuts, scale, window = rest[1], *rest[7:9]
    share = shares(query, wide(key, query), cuts, scale, window)
    of_share = torch.einsum("qhd,khd->hqk", grad, wide(value, query))
    scores = share * (of_share - (share * of_share).sum(-1, keepdim=True)) * scale
    of_key = torch.einsum("hqk,qhd->khd", scores, query)
    of_value = torch.einsum("hqk,qhd->khd", share, grad)
    groups = (-1, query.shape[1] // key.shape[1])
    summed = (part.unflatten(1, groups).sum(2) for part in (of_key, of_value))
    gradients = (torch.einsum("hqk,khd->qhd", scores, wide(key, query)), *summed)
    pairs = zip((query, key, value), gradients, strict=True)
    return tuple(torch.empty_like(part).copy_(gradient) for part, gradient in pairs)


@cache
def register() -> None:
    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)
