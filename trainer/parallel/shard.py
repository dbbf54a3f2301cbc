"""FSDP2 over the `shard` axis, or over `replicate` x `shard` (HSDP): one unit per block, the rest in the root."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainer.layout import Layout


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh over which parameters are sharded; with `replicate` > 1 two-dimensional, `shard` innermost."""
    if layout.replicate > 1:
        return init_device_mesh(device.type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (layout.shard,), mesh_dim_names=("shard",))


def policy_of(layout: Layout) -> MixedPrecisionPolicy:
    """Forward and backward in the layout's precision; gradients are reduced in float32."""
    if layout.precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, layout.precision), reduce_dtype=torch.float32)


def apply(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Make `module` a unit: its parameters are gathered around its forward and backward pass.

    ZeRO-2 keeps them gathered in between, ZeRO-3 does not (arXiv 2304.11277, section 3.3.1).
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=layout.zero_stage == 3, mp_policy=policy_of(layout))
