"""FSDP2 over `shard`, or `replicate` x `shard` (HSDP): a unit per block, and the root."""

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
    """Return FSDP's policy: compute in the layout's precision, reduce in float32."""
    if layout.precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, layout.precision), reduce_dtype=torch.float32
    )


def offload_of(layout: Layout, device: str) -> OffloadPolicy:
    """Return FSDP2's policy, one for weights, gradients and optimizer state together."""
    if not layout.offloads:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device != "cpu")


def apply(module: nn.Module, mesh: ParallelMesh) -> None:
    """Make `module` a unit, whose parameters are gathered around its forward and backward pass.

    ZeRO-2 keeps them gathered in between, ZeRO-3 does not (arXiv 2304.11277, section 3.3.1).
    """
    fully_shard(
        module,
        mesh=mesh.fsdp,
        reshard_after_forward=mesh.layout.zero_stage == 3,
        mp_policy=policy_of(mesh.layout),
        offload_policy=offload_of(mesh.layout, mesh.device_mesh.device_type),
    )


def check_shardable(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that FSDP2 can't gather block by block."""
    if layout.zero_stage == 0:
        return
    blocks = tuple(f"{block}." for block in spec.blocks)
    shared = [
        f"{alias} is one with {name}"
        for alias, name in spec.tied.items()
        if alias.startswith(blocks) or name.startswith(blocks)
    ]
    expected, stages = "blocks that share nothing", ""
    if not spec.blocks:
        reason, expected = "no blocks were found", "a model of repeated blocks"
        stages = " (stages 1 and 2)"
    elif shared:
        reason = shared[0]
    elif spec.tiny.input and _uses_weights_outside(spec, spec.tiny.input):
        reason = "a block's weight is used outside it"
    else:
        return
    place, seen = (
        f"zero_optimization.stage: {spec.name}",
        f"FSDP2 shards block by block, and {reason}",
    )
    hint = f'Set zero_optimization.stage to 0, or trainer.engine to "deepspeed"{stages}.'
    raise ConfigError(Problem(place, seen, expected, hint))


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
    """Raise NumericsError unless every block is an FSDP unit: one unit would gather all at once."""
    units = {name for name, inner in module.named_modules() if isinstance(inner, FSDPModule)}
    missing = [name for name in spec.blocks if f"model.{name}" not in units]
    if missing:
        count = f"{len(missing)} of {len(spec.blocks)} blocks"
        seen = f"{count} are no unit of their own ({missing[0]}, ...)"
        raise NumericsError(Problem("FSDP", seen, "one unit per block"))
