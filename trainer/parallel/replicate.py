"""Parameters that several processes hold whole: one gradient for all, counted once in the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from trainer.models.spec import ModelSpec
from trainer.parallel.mesh import Grid
from trainer.parallel.tensor import SUMMED

BUCKET_BYTES = 64 << 20


class Copies:
    """What of this rank's gradients other processes have too, and what has to be done about it.

    A tied table that the first and the last pipeline stage hold gets the sum of both gradients (Megatron-LM,
    arXiv 2104.04473, section 2.2).
    """

    def __init__(self, modules: Sequence[nn.Module], spec: ModelSpec, grid: Grid) -> None:
        layout = grid.layout
        named = [(name, p) for module in modules for name, p in module.named_parameters() if p.requires_grad]
        self._averaged = layout.zero_stage == 0 and layout.replicate > 1 and layout.pipeline * layout.tensor > 1
        whole = [f"model.{name}" for name, style in spec.tensor_plan.items() if style == SUMMED]
        self._partial = [p for name, p in named if name.rpartition(".")[0] in whole] if layout.tensor > 1 else []
        self._grid = grid
        self._parameters = [p for _, p in named]
        tied = {f"model.{name}" for name in spec.tied.values()} if layout.pipeline > 1 else set()
        self._tied: dict[str, list[nn.Parameter]] = {}
        for name, parameter in named:
            if name in tied:
                self._tied.setdefault(name, []).append(parameter)
        coordinate = grid.mesh.get_local_rank("pipeline") if layout.pipeline > 1 else 0
        self._pair: Any = None
        if tied and not grid.layout.schedule.folded:
            self._pair = ends(grid)
        self.shares = [(p, self._share(name, p, coordinate)) for name, p in named]
        """Each parameter, and which part of its squared norm this rank counts."""
        self.any = any(share != 1.0 for _, share in self.shares)

    def reduce(self) -> None:
        """Make the gradients of all copies one. Collective, after the last backward pass."""
        if self._averaged:
            gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
            add_up(gradients, self._grid.group("replicate"), self._grid.layout.replicate)
        if self._partial:
            add_up([local(p.grad) for p in self._partial if p.grad is not None], self._grid.group("tensor"))
        for copies in self._tied.values():
            gradients = [local(p.grad) for p in copies if p.grad is not None]
            total = gradients[0]
            for other in gradients[1:]:
                total += other
            if self._pair is not None:
                dist.all_reduce(total, group=self._pair)
            for other in gradients[1:]:
                other.copy_(total)

    def _share(self, name: str, parameter: nn.Parameter, coordinate: int) -> float:
        copies = self._tied.get(name)
        if copies and (coordinate > 0 or parameter is not copies[0]):
            return 0.0
        sharded = isinstance(parameter, DTensor) and any(
            axis == "tensor" and placement.is_shard()
            for axis, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
        )
        return 1.0 if sharded else 1.0 / self._grid.layout.tensor


def ends(grid: Grid) -> Any:
    """The group of this rank and its counterpart at the other end of the pipeline; None in between. Collective."""
    pairs = grid.mesh.mesh[[0, -1]].reshape(2, -1).T
    pair, _ = dist.new_subgroups_by_enumeration([[int(rank) for rank in pair] for pair in pairs])
    return pair


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_up(gradients: list[torch.Tensor], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Sum over a group, divided by `divisor`, in place, in buckets of like dtype."""
    for dtype in {gradient.dtype for gradient in gradients}:
        bucket: list[torch.Tensor] = []
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        for index, gradient in enumerate(alike):
            bucket.append(gradient)
            if index + 1 == len(alike) or sum(g.nbytes for g in bucket) >= BUCKET_BYTES:
                flat = _flatten_dense_tensors(bucket)
                dist.all_reduce(flat, group=group)
                flat /= divisor
                torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))
                bucket = []
