"""FSDP2 over the `shard` axis, or over `replicate` x `shard` (HSDP): one unit per block, the rest in the root."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.layout import Layout
from trainer.parallel.mesh import Grid


def policy_of(layout: Layout) -> MixedPrecisionPolicy:
    """Forward and backward in the layout's precision; gradients are reduced in float32."""
    if layout.precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, layout.precision), reduce_dtype=torch.float32)


def offload_of(layout: Layout, device: str) -> OffloadPolicy:
    """FSDP2 has one offload for a rank's share of all three: weights, gradients and optimizer state."""
    if not layout.offloads:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device != "cpu")


def apply(module: nn.Module, grid: Grid) -> None:
    """Make `module` a unit: its parameters are gathered around its forward and backward pass.

    ZeRO-2 keeps them gathered in between, ZeRO-3 does not (arXiv 2304.11277, section 3.3.1).
    """
    resharded = grid.layout.zero_stage == 3
    fully_shard(
        module,
        mesh=grid.data,
        reshard_after_forward=resharded,
        mp_policy=policy_of(grid.layout),
        offload_policy=offload_of(grid.layout, grid.mesh.device_type),
    )
