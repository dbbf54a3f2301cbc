"""Patches of PyTorch 2.15's fused optimizers: numbers on the device that they read in a step."""

from __future__ import annotations

import torch


def set_found_inf(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Have the fused kernel skip its next step if `found_inf`, a float32 scalar, is not zero.

    Symptom without it: a step by a gradient that is not finite writes NaN into the weights. The
    attribute is the protocol of `torch.amp.GradScaler`, which has no way to set it alone. Can go
    when `Optimizer.step` takes it as an argument.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def set_grad_scale(optimizer: torch.optim.Optimizer, grad_scale: torch.Tensor) -> None:
    """Have the fused kernel divide gradients by `grad_scale`, a float32 scalar, in its next steps.

    Without it clipping reads and writes all gradients once more. The attribute is of the same
    protocol.
    """
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
