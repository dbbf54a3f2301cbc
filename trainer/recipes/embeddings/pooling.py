"""One vector of a text's hidden states, as sentence-transformers' `Pooling` makes it."""

from __future__ import annotations

import torch


def pooled(hidden: torch.Tensor, pools: torch.Tensor, mode: str) -> torch.Tensor:
    """Return vectors [texts, width], float32 or wider, of hidden states [texts, tokens, width].

    `pools` [texts, tokens] is 1 for the tokens that are pooled, which follow one another: "mean" of
    them, the first ("cls"), or the last ("lasttoken").
    """
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if mode == "mean":
        weights = pools[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1e-9)
    places = pools.argmax(1)
    if mode == "lasttoken":
        places = places + pools.sum(1) - 1
    return hidden[torch.arange(len(hidden), device=hidden.device), places]
