"""Gradients after the last backward pass: reduced between ranks, measured, clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from trainer.distributed.dtensor import local
from trainer.distributed.ranks import group_of_rows
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.splits.matrices import has_partial_gradient
from trainer.tasks.task import bare_name

BUCKET_BYTES = 64 << 20


class GradientSync:
    """Reduces gradients of parameters that several ranks hold, where no DDP or FSDP does it.

    Averages over replicas; sums over tensor ranks, each of which saw a part of the activations; and
    sums over pipeline stages: a tied table on the first and the last stage gets the sum of both
    gradients (Megatron-LM, arXiv 2104.04473, section 2.2).
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        spec: ModelSpec,
        mesh: ParallelMesh,
        reduction: torch.dtype = torch.float32,
        *,
        averages: bool = False,
    ) -> None:
        """Find the parameters to reduce: between replicas in `reduction`, if `averages` is True,
        or tensor ranks or stages leave it to this."""
        layout = mesh.layout
        pairs = [pair for module in modules for pair in module.named_parameters()]
        named = [(name, p) for name, p in pairs if p.requires_grad]
        replicas = layout.zero_stage == 0 and layout.replicate > 1
        self._averaged = replicas and (averages or layout.pipeline * layout.tensor > 1)
        is_partial = has_partial_gradient(spec, layout)
        self._partial = [p for name, p in named if is_partial(bare_name(name))]
        self._mesh = mesh
        self._reduction = reduction
        self.parameters = [p for _, p in named]
        tied = {f"model.{name}" for name in spec.tied.values()} if layout.pipeline > 1 else set()
        self._pair: dist.ProcessGroup | None = None
        self._tied: dict[str, list[nn.Parameter]] = {}
        for name, parameter in named:
            if name in tied:
                self._tied.setdefault(name, []).append(parameter)
        if tied and not mesh.layout.schedule.folded:
            self._pair = ends(mesh)
            self._tied = {name: self._tied[name] for name in on_both(self._pair, self._tied)}
        self.counted = [p for name, p in named if self._counts(name, p)]
        """The parameters that this rank counts in the norm: each is counted once over `norm`."""

    def reduce(self) -> None:
        """Make the gradients of all copies of a parameter equal. Collective."""
        if self._averaged:
            gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
            size = self._mesh.size("replica")
            add_up(gradients, self._mesh.group("replica"), size, self._reduction)
        if self._partial:
            gradients = [local(p.grad) for p in self._partial if p.grad is not None]
            add_up(gradients, self._mesh.axis("tensor"))
        for copies in self._tied.values():
            gradients = [local(p.grad) for p in copies if p.grad is not None]
            total = gradients[0]
            for other in gradients[1:]:
                total += other
            if self._pair is not None:
                dist.all_reduce(total, group=self._pair)
            for other in gradients[1:]:
                other.copy_(total)

    def _counts(self, name: str, parameter: nn.Parameter) -> bool:
        copies = self._tied.get(name)
        if copies and (self._mesh.rank("pipeline") > 0 or parameter is not copies[0]):
            return False
        return _is_split(parameter) or self._mesh.rank("tensor") == 0


def _is_split(parameter: nn.Parameter) -> bool:
    """Return True for a parameter that is split over tensor or expert ranks."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    placed = dict(zip(axes, parameter.placements, strict=True)) if axes else {}
    return any(axis in placed and placed[axis].is_shard() for axis in ("tensor", "expert"))


class GradientNorm:
    """The gradient norm of the whole model, from each rank's part of it.

    `parameters`: all on this rank; `counted`: those of them that this rank counts.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        counted: Iterable[nn.Parameter],
        mesh: ParallelMesh,
        device: torch.device,
        scale: Callable[[list[torch.Tensor], torch.Tensor], None] | None = None,
    ) -> None:
        """`scale`: multiplies gradients by a scalar, if not at once then in the coming step."""
        mine = set(counted)
        self._parameters = [(p, p in mine) for p in parameters]
        self._mesh = mesh
        self._device = device
        self._scale = scale or _scale_at_once

    def clip(self, limit: float) -> torch.Tensor:
        """Return the norm; scale gradients down to `limit` if that is above 0. Collective."""
        mine = [(counts, local(p.grad)) for p, counts in self._parameters if p.grad is not None]
        counted = [gradient for counts, gradient in mine if counts]
        squares = torch.zeros(())  # a stage may be frozen as a whole
        if counted:
            # a CPU sums float32 sequentially: the norm of 5 million entries is off by 1e-3
            wide = None if counted[0].is_cuda else torch.float64
            norms = torch.stack(list(torch._foreach_norm(counted, 2, wide)))
            squares = norms.float().square().sum()
        total = squares.to(self._device)  # gradients may be offloaded
        norm = self._mesh.sum(total, "norm").sqrt()
        if limit > 0 and mine:
            factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
            self._scale([gradient for _, gradient in mine], factor)
        return norm


def _scale_at_once(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a scalar, in place."""
    torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def ends(mesh: ParallelMesh) -> dist.ProcessGroup | None:
    """Return the group of first and last stage; None on a stage in between. Collective."""
    pairs = mesh.device_mesh.mesh[[0, -1]].reshape(2, -1).T
    return group_of_rows([[int(rank) for rank in pair] for pair in pairs])


def on_both(pair: dist.ProcessGroup | None, names: Iterable[str]) -> list[str]:
    """Return the `names` that both first and last stage have. Collective."""
    if pair is None:
        return []
    by_stage: list[list[str]] = [[], []]
    dist.all_gather_object(by_stage, sorted(names), group=pair)
    return [name for name in by_stage[0] if name in by_stage[1]]


def add_up(
    gradients: list[torch.Tensor],
    group: dist.ProcessGroup | None,
    divisor: int = 1,
    reduction: torch.dtype = torch.float32,
) -> None:
    """Sum gradients in place, in buckets of one dtype, divided by `divisor`. Collective.

    Those in float32 are sent in the dtype `reduction`.
    """
    for dtype in {gradient.dtype for gradient in gradients}:
        bucket: list[torch.Tensor] = []
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        for index, gradient in enumerate(alike):
            bucket.append(gradient)
            if index + 1 == len(alike) or sum(g.nbytes for g in bucket) >= BUCKET_BYTES:
                flat = _flatten_dense_tensors(bucket)
                flat = flat.to(reduction) if dtype == torch.float32 else flat
                dist.all_reduce(flat, group=group)
                flat /= divisor
                torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))
                bucket = []
