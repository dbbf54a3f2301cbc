"""The ranks of a layout as a DeviceMesh, its reductions, and the check of replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.distributed.context_ranks import ContextRanks, Division
from trainer.distributed.dtensor import local
from trainer.distributed.exchange import Exchange
from trainer.distributed.ranks import Ranks, group_of_rows
from trainer.errors import NumericsError, Problem
from trainer.layout import AXES, Layout

REDUCTIONS: dict[str, tuple[str, ...]] = {
    "batch": ("replicate", "shard"),
    "loss": ("pipeline", "replicate", "shard"),
    "shard": ("shard",),
    "replica": ("replicate",),
    "norm": ("pipeline", "shard", "tensor"),
}
"""Reduction -> the mesh axes along which it runs. Another axis is added here, not as a division
elsewhere.

`batch`: ranks with different samples, whose gradients are averaged. `loss`: ranks among which each
token's loss and each target is on one. `shard`: ranks that share one copy of each parameter.
`replica`: ranks that hold the same shard. `norm`: ranks that together hold each gradient once.
"""

EXPERT_AXES = ("pipeline", "replicate", "expert_shard", "expert")
"""The axes of the mesh of routed experts, outermost first; its last two divide shard x tensor."""


@dataclass(frozen=True)
class ParallelMesh:
    """The mesh pipeline x replicate x shard x tensor, row-major, with the groups that reduce."""

    layout: Layout
    device_mesh: DeviceMesh
    """All axes, with those of size 1."""
    groups: Mapping[str, dist.ProcessGroup | None]
    """The process group of each reduction; None if this rank is alone in it."""
    context: ContextRanks | None = None
    """The ranks that share rows with this one; None if it has whole rows."""
    experts: DeviceMesh | None = None
    """The mesh of EXPERT_AXES, of the same ranks; None if experts are not divided."""
    secondary: DeviceMesh | None = None
    """The mesh [copies, ranks of a copy] of ZeRO-3's second copies; None without (`hpZ`)."""

    def group(self, reduction: str) -> dist.ProcessGroup | None:
        """Return the ranks with which this one reduces; None if it is alone."""
        return self.groups[reduction]

    def size(self, reduction: str) -> int:
        """Return the number of ranks that reduce together."""
        group = self.groups[reduction]
        return group.size() if group is not None else 1

    def sum(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Sum `tensor` in place over a reduction, and return it. Collective over its group."""
        if (group := self.groups[reduction]) is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def begin_sum(self, tensor: torch.Tensor, reduction: str) -> Callable[[], torch.Tensor]:
        """Begin to sum `tensor` in place; return what waits for the sum, and returns it.

        Collective over its group, whose ranks need not call what is returned.
        """
        if (group := self.groups[reduction]) is None:
            return lambda: tensor
        work = dist.all_reduce(tensor, group=group, async_op=True)

        @cache
        def awaited() -> torch.Tensor:
            work.wait()
            return tensor

        return awaited

    def axis(self, name: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one along one axis alone."""
        return self.device_mesh[name].get_group()

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.device_mesh.get_local_rank(axis)

    @cached_property
    def stages(self) -> list[int]:
        """The pipeline stages on this rank, in order."""
        return self.layout.stages_of(self.rank("pipeline"))

    @cached_property
    def has_loss(self) -> bool:
        """True if this rank holds the last stage, which computes the loss."""
        return self.layout.stages - 1 in self.stages

    def dividing_rows(self) -> AbstractContextManager[None]:
        """Wrap forward and backward passes in which ranks that share rows have a part of each."""
        return self.context.dividing() if self.context is not None else nullcontext()

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP shards: `shard`, or `replicate` x `shard` (HSDP)."""
        if self.layout.replicate > 1:
            return self.device_mesh["replicate", "shard"]
        return self.device_mesh["shard"]


def holders_of(mesh: ParallelMesh) -> tuple[dist.ProcessGroup | None, list[dict[str, int]]]:
    """Make the group of the ranks that hold the same blocks, whole or in parts. Collective.

    Returns None for a rank alone, and the coordinates of each rank of the group by axis.
    """
    sizes = [getattr(mesh.layout, axis) for axis in AXES]
    group = _group(mesh.device_mesh, tuple(a for a in AXES[1:] if getattr(mesh.layout, a) > 1))
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    meshes = {AXES: sizes, EXPERT_AXES: _expert_sizes(mesh.layout)}
    return group, [
        {
            axis: int(at)
            for axes, along in meshes.items()
            for axis, at in zip(axes, np.unravel_index(rank, along), strict=True)
        }
        for rank in ranks
    ]


def parallel_mesh_of(layout: Layout, device: torch.device, heads: int = 0) -> ParallelMesh:
    """Make the process groups of a layout. Collective.

    `heads`: those of the model's attention, which ranks that share rows divide as far as they can.
    """
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    experts = expert_mesh(layout, mesh) if layout.expert > 1 else None
    context = _context_ranks(layout, mesh, heads)
    second = secondary_mesh(layout, mesh) if layout.regathered else None
    return ParallelMesh(layout, mesh, groups_of(mesh), context, experts, second)


def secondary_mesh(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """Make the mesh [copies, ranks of a copy] of ZeRO-3's second copies. Collective.

    The ranks of a copy are neighbours on `shard`.
    """
    pipeline, replicate, shard, tensor = mesh.mesh.shape
    size = layout.regathered
    ranks = mesh.mesh.view(pipeline, replicate, shard // size, size, tensor)
    groups = [group_of_rows(_rows(ranks, along)) for along in ([1, 2], [3])]
    here = ranks[mesh.get_local_rank("pipeline"), ..., mesh.get_local_rank("tensor")]
    names = ("copy", "part")
    own = here.reshape(-1, size)
    return DeviceMesh.from_group(groups, mesh.device_type, own, mesh_dim_names=names)


def expert_mesh(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """Make the mesh of EXPERT_AXES. Collective.

    Its outer axes have the groups that `mesh` has of them, so that none is made twice.
    """
    sizes = _expert_sizes(layout)
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    groups = [mesh[axis].get_group() for axis in EXPERT_AXES[:2]]
    groups += [group_of_rows(_rows(ranks, [axis])) for axis in (2, 3)]
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=EXPERT_AXES)


def _expert_sizes(layout: Layout) -> tuple[int, ...]:
    whole = layout.shard * layout.tensor
    return layout.pipeline, layout.replicate, whole // layout.expert, layout.expert


def division_of(layout: Layout, heads: int) -> Division:
    """Return how ranks share rows: with the largest groups whose ranks divide the heads."""
    return Division(layout.context, layout.row_groups(heads))


def _context_ranks(layout: Layout, mesh: DeviceMesh, heads: int) -> ContextRanks | None:
    """Make the groups of neighbours on `replicate` x `shard` that share rows. Collective."""
    if layout.context == 1:
        return None
    division = division_of(layout, heads)
    data = ranks_along(mesh, REDUCTIONS["batch"])
    size = division.size
    inner = division.group_size
    groups = [row[i : i + inner] for row in data for i in range(0, len(row), inner)]
    rows = [row[i : i + size] for row in data for i in range(0, len(row), size)]
    alike = [row[i::inner] for row in rows for i in range(inner)]
    heads_of, rows_of = (
        Exchange(group_of_rows(g)) if len(g[0]) > 1 else None for g in (groups, alike)
    )
    every = Exchange(group_of_rows(rows)) if 1 < inner < size else None
    return ContextRanks(division, heads_of, rows_of, every)


def groups_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup | None]:
    """Make this rank's group of each reduction. Collective."""
    by_axes: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
    groups = {}
    for reduction, axes in REDUCTIONS.items():
        along = tuple(axis for axis in axes if mesh[axis].size() > 1)
        if along not in by_axes:
            by_axes[along] = _group(mesh, along)
        groups[reduction] = by_axes[along]
    return groups


def ranks_along(mesh: DeviceMesh, axes: tuple[str, ...]) -> list[list[int]]:
    """List the groups of ranks that differ along these axes alone."""
    names = mesh.mesh_dim_names or ()
    return _rows(mesh.mesh, [*map(names.index, axes)])


def _rows(ranks: torch.Tensor, along: Sequence[int]) -> list[list[int]]:
    """List the rows of an array of ranks along these dimensions."""
    moved = ranks.movedim([*along], list(range(-len(along), 0)))
    rows = moved.reshape(-1, math.prod(moved.shape[-len(along) :]))
    return [[int(rank) for rank in row] for row in rows]


def _group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
    if not axes:
        return None
    if len(axes) == 1:
        return mesh[axes[0]].get_group()
    rows = ranks_along(mesh, axes)
    if len(rows) == 1:  # all ranks
        return dist.distributed_c10d._get_default_group()
    return group_of_rows(rows)  # type: ignore[no-any-return]


def check_replicas(modules: Sequence[nn.Module], mesh: ParallelMesh, ranks: Ranks) -> None:
    """Raise NumericsError if ranks of a `replica` differ in their parameters. Collective."""
    if (group := mesh.group("replica")) is None:
        return
    with torch.no_grad():
        sums = torch.stack([_checksum(local(p)) for module in modules for p in module.parameters()])
    own = [float(value) for value in sums]
    first = dist.get_process_group_ranks(group)[0]
    sent = [own]
    dist.broadcast_object_list(sent, first, group=group)
    if odd := ranks.lowest(None if sent[0] == own else first):
        actual = f"other initial values on rank {odd[0]} than on rank {odd[1]}"
        raise NumericsError(Problem("replicas", actual, "the same on all replicas")).share()


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Sum the values in float64, a part at a time: this is where a rank's memory is fullest."""
    return torch.stack(
        [part.sum(dtype=torch.float64) for part in values.reshape(-1).split(1 << 20)]
    ).sum()
