"""PyTorch's attention by cu_seqlens and in blocks on the CPU: the operators by cu_seqlens get kernels
by their definition.

All else is PyTorch's own: the checks of its arguments, autograd, what `torch.compile` sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import varlen


def shares(query: Any, key: Any, cuts: Any, cuts_k: Any, scale: Any, window: Any) -> torch.Tensor:
    """Return the softmax of the scores, [heads, queries, keys], zero outside of a sequence.

    The last query of a sequence is at its last key.
    """

    def placed(count: int, cuts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(count)
        number = torch.searchsorted(cuts.long(), at, right=True)
        return number, at - cuts[number]

    (number, q), (number_k, k) = placed(len(query), cuts), placed(len(key), cuts_k)
    ages = q[:, None] - k
    actual = (ages >= 0) & (number[:, None] == number_k)
    actual &= (ages <= window[0]) if window[0] >= 0 else True
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~actual, -torch.inf).softmax(-1)


def wide(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Repeat key or value heads for each query head."""
    return part.repeat_interleave(like.shape[1] // part.shape[1], 1)


def forward(
    query: Any, key: Any, value: Any, cuts: Any, cuts_k: Any, max_q: int, max_k: int, *more: Any
) -> Any:
    _, scale, window = more[:3]
    assert max_q >= int(cuts.diff().max()) and max_k >= int(cuts_k.diff().max())
    assert cuts.dtype == cuts_k.dtype == torch.int32 and len(cuts) == len(cuts_k)
    assert (int(cuts[-1]), int(cuts_k[-1])) == (len(query), len(key)) and window[1] == 0
    share = shares(query, wide(key, query), cuts, cuts_k, scale, window)
    out = torch.einsum("hqk,khd->qhd", share, wide(value, query))
    out = torch.empty_like(query).copy_(out)  # its layout is stated for compilers
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def backward(grad: Any, query: Any, key: Any, value: Any, out: Any, *rest: Any) -> Any:
    share = shares(query, wide(key, query), *rest[1:3], *rest[7:9])
    scale = rest[7]
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


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let the operators by cu_seqlens and in blocks run here, forward and backward."""
    from torch.nn.attention import flex_attention as flex
    from transformers.integrations import flex_attention as theirs

    def eager(*heads: Any, training: bool = False, **more: Any) -> Any:
        return flex.flex_attention(*heads, **more)

    register()
    with ExitStack() as stack:
        # PyTorch refuses a backward pass on the CPU, though its definition of the operator has one
        stack.enter_context(patch.object(flex, "_validate_device", lambda *_: None))
        stack.enter_context(patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True))
        stack.enter_context(patch.object(theirs, "compile_friendly_flex_attention", eager))
        yield
