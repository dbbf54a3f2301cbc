"""FSDP2 over the `shard` axis, or over `replicate` x `shard` (HSDP): one unit per block, the rest
in the root.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parameter import UninitializedParameter

from trainer.errors import ConfigError, NumericsError, Problem
from trainer.layout import Layout
from trainer.models.materialise import on_host
from trainer.models.spec import ModelSpec, Trial
from trainer.parallel.parallel_mesh import ParallelMesh


def policy_of(layout: Layout) -> MixedPrecisionPolicy:
    """Return FSDP's policy: forward and backward in the layout's precision, gradients reduced in
    float32.
    """
    if layout.precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, layout.precision), reduce_dtype=torch.float32
    )


def offload_of(layout: Layout, device: str) -> OffloadPolicy:
    """Return FSDP2's policy, one for a rank's weights, gradients and optimizer state: all offloaded
    or none.
    """
    if not layout.offloads:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device != "cpu")


def apply(module: nn.Module, mesh: ParallelMesh) -> None:
    """Make `module` a unit, whose parameters are gathered around its forward and backward pass.

    ZeRO-2 keeps them gathered in between, ZeRO-3 does not (arXiv 2304.11277, section 3.3.1).
    """
    resharded = mesh.layout.zero_stage == 3
    fully_shard(
        module,
        mesh=mesh.fsdp,
        reshard_after_forward=resharded,
        mp_policy=policy_of(mesh.layout),
        offload_policy=offload_of(mesh.layout, mesh.device_mesh.device_type),
    )


def check_shardable(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError if FSDP2 would gather the whole model at once, or can't gather a block
    alone.
    """
    if layout.zero_stage > 0 and not spec.blocks:
        mend = (
            'Set zero_optimization.stage to 0, or trainer.engine to "deepspeed" (stages 1 and 2).'
        )
        seen = "FSDP2 shards block by block, and no blocks were found"
        raise ConfigError(
            Problem(
                f"zero_optimization.stage: {spec.name}", seen, "a model of repeated blocks", mend
            )
        )
    blocks = tuple(f"{block}." for block in spec.blocks)
    shared = [
        (alias, name)
        for alias, name in spec.tied.items()
        if alias.startswith(blocks) or name.startswith(blocks)
    ]
    if layout.zero_stage > 0 and shared:
        alias, name = shared[0]
        mend = 'Set zero_optimization.stage to 0, or trainer.engine to "deepspeed".'
        seen = f"FSDP2 shards block by block, and {alias} is one with {name}"
        raise ConfigError(
            Problem(
                f"zero_optimization.stage: {spec.name}", seen, "blocks that share nothing", mend
            )
        )
    if layout.zero_stage > 0 and spec.tiny.input and _uses_weights_outside(spec, spec.tiny.input):
        mend = 'Set zero_optimization.stage to 0, or trainer.engine to "deepspeed".'
        seen = "FSDP2 shards block by block, and a block's weight is used outside it"
        raise ConfigError(
            Problem(
                f"zero_optimization.stage: {spec.name}", seen, "blocks that share nothing", mend
            )
        )


def _uses_weights_outside(spec: ModelSpec, trial: Trial) -> bool:
    """Return True if a forward pass fails when each block has its parameters only while it runs."""
    model = on_host(spec)
    for name in spec.blocks:
        block = model.get_submodule(name)
        own = [(inner, dict(inner._parameters)) for inner in block.modules()]
        empty = [
            (inner, {k: None if p is None else UninitializedParameter() for k, p in of.items()})
            for inner, of in own
        ]

        def put(*_: Any, parts: Any) -> None:
            for inner, parameters in parts:
                inner._parameters.update(parameters)

        put(parts=empty)
        block.register_forward_pre_hook(partial(put, parts=own))
        block.register_forward_hook(partial(put, parts=empty))
    try:
        with torch.no_grad():
            trial.output(model.eval())
    except Exception:  # whatever a module's own code raises
        return True
    return False


def check_units(module: nn.Module, spec: ModelSpec) -> None:
    """Raise NumericsError unless every block is an FSDP unit of its own: one flat unit would gather
    all at once.
    """
    units = {name for name, inner in module.named_modules() if isinstance(inner, FSDPModule)}
    missing = [name for name in spec.blocks if f"model.{name}" not in units]
    if missing:
        seen = (
            f"{len(missing)} of {len(spec.blocks)} blocks are no unit of their own "
            f"({missing[0]}, ...)"
        )
        raise NumericsError(Problem("FSDP", seen, "one unit per block"))
