"""The processes of a layout as one DeviceMesh, and the groups of them that reduce together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.layout import AXES, Layout


@dataclass(frozen=True)
class Grid:
    """Pipeline x replicate x shard x tensor, row-major."""

    layout: Layout
    mesh: DeviceMesh
    """All four axes, also those of size 1."""
    replica: dist.ProcessGroup | None
    """The processes that together hold one whole replica of the model; None: all processes."""

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh[axis].get_group()

    @property
    def data(self) -> DeviceMesh:
        """What FSDP shards over; with `replicate` > 1 two-dimensional (HSDP), `shard` innermost."""
        return self.mesh["replicate", "shard"] if self.layout.replicate > 1 else self.mesh["shard"]


def grid_of(layout: Layout, device: torch.device) -> Grid:
    """Make the process groups of a layout. Collective."""
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    replica: Any = None
    if layout.replicate > 1:
        of_replica = mesh.mesh.movedim(AXES.index("replicate"), 0).reshape(layout.replicate, -1)
        replica, _ = dist.new_subgroups_by_enumeration([[int(rank) for rank in row] for row in of_replica])
    return Grid(layout, mesh, replica)
