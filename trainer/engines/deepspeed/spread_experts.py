"""Experts over several ranks: transformers' own layers, spread as on the mesh engine, under ZeRO.

DeepSpeed's AutoEP would put layers of its own, with a router of its own, in their place. Its ZeRO
shards and reduces what is marked as AutoEP's experts are over the ranks that have the same ones,
divides their gradients by all data ranks, as others are, and adds up the norm over all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.engines.deepspeed import patches
from trainer.engines.deepspeed.tensor import Split
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.splits.expert_ranks import stacks


def ready(layout: Layout, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of ZeRO that DeepSpeed asserts with experts."""
    zero = settings.get("zero_optimization", {})
    for key in ("contiguous_gradients", "reduce_scatter"):
        if layout.expert > 1 and zero.get(key) is False:
            expected = "true: DeepSpeed reduces gradients of spread experts in no other way"
            raise ConfigError(Problem(f"zero_optimization.{key}", "false", expected, "Remove it"))


def mark(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> list[nn.Parameter]:
    """Mark the parameters of spread experts for ZeRO, and return them; none if none are."""
    if mesh.experts is None:
        return []
    layers = [model.get_submodule(name) for name in stacks(model, spec)]
    found = [parameter for layer in layers for parameter in layer.parameters()]
    patches.mark_experts(found, mesh.experts)
    return found


def split_of(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> Split:
    """Return the spread experts of a model as parameters that are split, if any are."""
    dims: dict[torch.Tensor, int] = dict.fromkeys(mark(model, spec, mesh), 0)
    if mesh.experts is None:
        return Split(dims, mesh.device_mesh, "tensor")
    return Split(dims, mesh.experts, "expert")
