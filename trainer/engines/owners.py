"""The rank that writes each state tensor into a checkpoint; the same list on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.balance import least_loaded
from trainer.engines.engine import Observer
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.state import WEIGHT, StateTensor

T = TypeVar("T")
Kind = tuple[str, str, tuple[int, ...], torch.dtype]
"""Name, key, shape and dtype of a state tensor."""


def state_tensors_of(
    local: Mapping[Kind, T],
    mesh: ParallelMesh,
    make: Callable[[Kind, T | None, bool, int], StateTensor],
) -> list[StateTensor]:
    """List the state tensors of all pipeline stages; this rank has those `local`. Collective.

    Each is `make(kind, local tensor or None, True if it is read from this rank's stage, owner)`.
    """
    stages = owning_stages(local, mesh)
    owner = owners(stages, mesh)
    own_stage = mesh.rank("pipeline")
    return [
        make(kind, local.get(kind), stage == own_stage, owner[kind[0]])
        for kind, stage in stages.items()
    ]


def owning_stages(local: Iterable[Kind], mesh: ParallelMesh) -> dict[Kind, int]:
    """Map every state tensor to the first pipeline rank that has it. Collective."""
    local_by_stage: list[list[Kind]] = [list(local)]
    if mesh.layout.pipeline > 1:
        local_by_stage = [[] for _ in range(mesh.layout.pipeline)]
        dist.all_gather_object(local_by_stage, list(local), group=mesh.axis("pipeline"))
    stages: dict[Kind, int] = {}
    for pipeline_rank, kinds in enumerate(local_by_stage):
        for kind in kinds:
            stages.setdefault(kind, pipeline_rank)
    return stages


def owners(stages: Mapping[Kind, int], mesh: ParallelMesh) -> dict[str, int]:
    """Choose the rank that writes the state of each name: one of the stage that holds it."""
    sizes: dict[str, int] = {}
    for name, _, shape, _ in stages:
        sizes[name] = sizes.get(name, 0) + math.prod(shape)
    stage_of = {kind[0]: stage for kind, stage in stages.items()}
    candidates = [mesh.layout.ranks_of(stage) for stage in stage_of.values()]
    return dict(zip(sizes, least_loaded(list(sizes.values()), candidates), strict=True))


def report(gradients: Mapping[str, torch.Tensor], mesh: ParallelMesh, observe: Observer) -> None:
    """Call `observe` on every rank with all stages' gradients, given this one's. Collective."""
    kinds = [(name, WEIGHT, tuple(g.shape), g.dtype) for name, g in gradients.items()]
    stages = owning_stages(kinds, mesh)
    for (name, _, shape, dtype), stage in stages.items():
        if stage == mesh.rank("pipeline"):
            value = gradients[name]
        else:
            value = torch.empty(shape, dtype=dtype, device=mesh.device_mesh.device_type)
        if mesh.layout.pipeline > 1:
            dist.broadcast(value.contiguous(), group=mesh.axis("pipeline"), group_src=stage)
        observe(name, value)


def persistent_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the buffers that are stored with the weights, by name."""
    transient = {
        f"{name}.{key}".lstrip(".")
        for name, module in root.named_modules()
        for key in module._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in root.named_buffers() if name not in transient]
