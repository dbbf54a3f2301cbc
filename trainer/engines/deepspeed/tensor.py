"""Matrices and experts that ranks divide under DeepSpeed.

AutoTP splits matrices by the model's own tensor plan instead of guesses from names. Experts are
transformers' own layers, spread as on the mesh engine: DeepSpeed's AutoEP would put layers of its
own, with a router of its own, in their place. Its ZeRO shards and reduces what is marked as
AutoEP's experts are over the ranks that have the same ones, divides their gradients by all data
ranks, as others are, and adds up the norm over all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.engines.deepspeed import patches
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.names import expert_stacks
from trainer.models.spec import WHOLE, ModelSpec
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.probes import tensor_parts
from trainer.parallel.splits import matrices
from trainer.state import Part
from trainer.storage import Json

NOTE = "AutoTP divides a model that is there: each rank holds all of it in host memory at the start"
_KINDS: dict[str, Json] = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
"""AutoTP's rules by transformers' names for the styles."""


def refusal(layout: Layout) -> str | None:
    """Return the reason why AutoTP can't run a layout, or None."""
    if layout.pipeline > 1:
        return "Its AutoTP is not used with its PipelineModule; the mesh engine runs the product."
    if layout.expert > 1:
        return "Its AutoTP and spread experts are not used together; the mesh engine runs both."
    if layout.zero_stage == 3:
        return "Its AutoTP is used with ZeRO 0 to 2; the mesh engine runs the product with ZeRO-3."
    if layout.sequence_parallel:
        return "AutoTP has no sequence parallelism; the mesh engine has."
    return None


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that AutoTP would not split exactly."""
    tensor_parts.check(spec, layout)
    styles = set(spec.language.tensor_plan.values())
    hint = 'Set trainer.engine to "mesh".'
    if WHOLE in styles:
        place = f"engine deepspeed: {spec.name}"
        actual = "an adapter, and AutoTP would take each of its matrices for a layer"
        raise ConfigError(Problem(place, actual, "no adapter in what it splits", hint))
    is_partial = matrices.has_partial_gradient(spec, layout)
    named = spec.build().named_parameters()
    summed = {name.rpartition(".")[0] for name, _ in named if is_partial(name)}
    whole = summed - spec.language.tensor_plan.keys()
    styles |= {f"whole ({name.rpartition('.')[2]})" for name in whole}
    if unknown := sorted(styles - _KINDS.keys()):
        place = f"tensor_parallel.autotp_size: {spec.name}"
        actual = f"split as {', '.join(unknown)}"
        raise ConfigError(Problem(place, actual, f"one of {', '.join(_KINDS)}", hint))


def groups(layout: Layout) -> ModuleType:
    """Make DeepSpeed's groups of data and tensor ranks, equal to the layout's. Collective."""
    from deepspeed.utils import groups

    groups._init_tp_mesh_device(tensor_model_parallel_size=layout.tensor)
    return groups


def section(spec: ModelSpec, given: Json) -> Json:
    """Return the JSON's section `tensor_parallel`, with the model's plan as rules."""
    rules = [
        {"patterns": [rf".*\b{re.escape(name)}\.weight$"], **_KINDS[style]}
        for name, style in spec.language.tensor_plan.items()
    ]
    plan = {"use_default_specs": False, "layer_specs": rules}
    kept = {key: value for key, value in given.items() if key in ("autotp_size", "tp_overlap_comm")}
    return {**kept, "vocab_parallel_lm_head": False, "partition_config": plan}


class Split:
    """The parameters that are split along an axis of a mesh, each with its dimension."""

    def __init__(self, dims: Mapping[torch.Tensor, int], along: DeviceMesh, axis: str) -> None:
        self.mesh = along
        self.axis = axis
        self._group = along[axis].get_group()
        self._ranks = self._group.size()
        self._rank = along.get_local_rank(axis)
        self._dims = dims

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._dims

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        dim = self._dims.get(parameter)
        own = own_shape(parameter)
        return tuple(size * self._ranks if index == dim else size for index, size in enumerate(own))

    def whole(self, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Gather a parameter, its gradient or its state from the ranks of the axis. Collective."""
        if parameter not in self._dims:
            return own
        own = own.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts, self._dims[parameter])

    def own(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, which a DTensor already is."""
        if isinstance(whole, DTensor):
            return whole.to_local()
        if parameter not in self._dims:
            return whole
        return whole.chunk(self._ranks, self._dims[parameter])[self._rank]

    def place(self, parameter: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """Return where this rank's part begins in the whole, and the whole's strides, in values."""
        part = self.own(parameter, torch.empty(self.shape(parameter), device="meta"))
        return int(part.storage_offset()), part.stride()


def split_of(module: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> Split:
    """Return the parameters of a `ModelWithLoss` that AutoTP has split."""
    dims: dict[torch.Tensor, int] = {}
    for name, style in spec.language.tensor_plan.items():
        kind = _KINDS[style]["partition_type"]
        if kind != "skip":
            for key, parameter in module.get_submodule(f"model.{name}").named_parameters():
                if kind == "column" or key == "weight":
                    dims[parameter] = 0 if kind == "column" else 1
    return Split(dims, mesh.device_mesh, "tensor")


def own_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that ZeRO-3 has partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def ranges(
    values: torch.Tensor,
    start: int,
    flat: torch.Tensor,
    offset: int,
    strides: tuple[int, ...] | None,
) -> list[Part]:
    """Return a range, from `start` on, of a rank's parameter `flat` as parts of the whole.

    Between its rows the whole may have those of other ranks.
    """
    if strides is None or strides == torch.empty(own_shape(flat), device="meta").stride():
        return [Part(values, offset + start, (1,))] if len(values) else []
    parts = []
    width = own_shape(flat)[-1]
    while len(values):
        row, column = divmod(start, width)
        most = width - column if column or len(values) < width else len(values) // width * width
        part = values[:most]
        values = values[most:]
        rows = part.view(-1, min(width, len(part)))
        parts.append(Part(rows, offset + row * strides[0] + column, (strides[0], 1)))
        start += len(part)
    return parts


def check_keys(layout: Layout, settings: Json) -> None:
    """Raise ConfigError for keys of ZeRO that DeepSpeed asserts with experts."""
    zero = settings.get("zero_optimization", {})
    for key in ("contiguous_gradients", "reduce_scatter"):
        if layout.expert > 1 and zero.get(key) is False:
            expected = "true: DeepSpeed reduces gradients of spread experts in no other way"
            raise ConfigError(Problem(f"zero_optimization.{key}", "false", expected, "Remove it"))


def mark_experts(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> list[nn.Parameter]:
    """Mark the parameters of spread experts for ZeRO, and return them; none if none are."""
    if mesh.experts is None:
        return []
    layers = [model.get_submodule(name) for name in expert_stacks(model, spec.blocks)]
    experts = [parameter for layer in layers for parameter in layer.parameters()]
    patches.mark_experts(experts, mesh.experts)
    return experts


def split_of_experts(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> Split:
    """Return the spread experts of a model as parameters that are split, if any are."""
    dims: dict[torch.Tensor, int] = dict.fromkeys(mark_experts(model, spec, mesh), 0)
    if mesh.experts is None:
        return Split(dims, mesh.device_mesh, "tensor")
    return Split(dims, mesh.experts, "expert")
