"""Muon's params, and the same steps computed finely."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

MUON = {"type": "Muon", "params": {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}}


def in_float32(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """PyTorch's iteration without bfloat16, in which last bits of gradients become visible."""
    a, b, c = coefficients
    x = gradient.float() / gradient.float().norm().clamp(min=eps)
    x = x.T if len(gradient) > gradient.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(gradient) > gradient.shape[1] else x


def finely(train: Any, **arguments: Any) -> Any:
    """Train with an iteration in float32. Runs on each rank of a pool, too."""
    fine = patch("torch.optim._muon._zeropower_via_newtonschulz", in_float32)
    with fine, patch("trainer.optim.muon.LOW", torch.float32):
        return train(**arguments)
