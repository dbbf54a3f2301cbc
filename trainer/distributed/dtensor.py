"""A process's shard of a DTensor: cut from the whole tensor, and its place there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a DTensor, or the whole of any other tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(part, "_tensor", part)  # within torchao's, which is gathered in float8


def part_of(along: DeviceMesh, whole: nn.Parameter, dim: int) -> nn.Parameter:
    """Return this process's part of a parameter that is divided along one axis; sends nothing."""
    data = distribute_tensor(whole.data, along, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(data, requires_grad=whole.requires_grad)


def own_shard(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return the view of a whole tensor that is this process's part of `like`."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    return shard_at(value, like, coordinate)


def own_rows(like: torch.Tensor) -> range:
    """Return the rows, along the first dimension, of which this process has a part."""
    if not isinstance(like, DTensor):
        return range(len(like))
    return rows_of(own_shard(torch.empty(like.shape, device="meta"), like))


def rows_of(part: torch.Tensor) -> range:
    """Return the rows of a whole tensor of which a view of it has a part."""
    start = part.storage_offset() // part.stride(0)
    return range(start, start + len(part))


def shard_at(value: torch.Tensor, like: DTensor, coordinate: Sequence[int]) -> torch.Tensor:
    """Return the view of a whole tensor that is the part of `like` at a coordinate of its mesh.

    The innermost axis divides first: FSDP shards the part that tensor parallelism leaves (DTensor's
    strided sharding).
    """
    for axis in reversed(range(like.device_mesh.ndim)):
        dim = getattr(like.placements[axis], "dim", None)
        if dim is not None:
            chunks = value.chunk(like.device_mesh.size(axis), dim)
            at = coordinate[axis]
            value = chunks[at] if at < len(chunks) else value.narrow(dim, 0, 0)
    return value


def own_position(like: DTensor, owner: int) -> tuple[int, tuple[int, ...]] | None:
    """Return where this process's part begins in the whole, and the whole's strides, in values.

    None if another process writes an equal part: that of the replica in which `owner` is does.
    """
    own = like.device_mesh.get_coordinate()
    at = coordinate_in(like.device_mesh, owner)
    if own is None or at is None:
        return None
    if any(not hasattr(p, "dim") and own[a] != at[a] for a, p in enumerate(like.placements)):
        return None
    return shard_place(like)


def shard_place(like: DTensor) -> tuple[int, tuple[int, ...]]:
    """Return where this process's part begins in the whole, and the whole's strides, in values."""
    part = own_shard(torch.empty(like.shape, device="meta"), like)
    return int(part.storage_offset()), part.stride()


@lru_cache
def coordinate_in(mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
    """Return where a rank is in a mesh; None if it is not."""
    coordinates = np.argwhere(mesh.mesh.numpy() == rank).tolist()
    return tuple(coordinates[0]) if coordinates else None
