"""A patch of PyTorch 2.15's fused optimizers: a flag on the device makes them skip a step."""

from __future__ import annotations

import torch


def set_found_inf(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Have the fused kernel skip its next step if `found_inf`, a float32 scalar, is not zero.

    Symptom without it: a step by a gradient that is not finite writes NaN into the weights. The
    attribute is the protocol of `torch.amp.GradScaler`, which has no way to set it alone. Can go
    when `Optimizer.step` takes it as an argument.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
