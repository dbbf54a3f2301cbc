"""A process's shard of a DTensor: cut from the whole tensor, and gathered on one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.distributed.ranks import Ranks

BUFFER_BYTES = 64 << 20
"""Bytes of a device's memory that gathering takes, approximately."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a DTensor, or the whole of any other tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(part, "_tensor", part)  # within torchao's, which is gathered in float8


def own_shard(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return the view of a whole tensor that is this process's part of `like`."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    return shard_at(value, like, coordinate)


def shard_at(value: torch.Tensor, like: DTensor, coordinate: Sequence[int]) -> torch.Tensor:
    """Return the view of a whole tensor that is the part of `like` at a coordinate of its mesh.

    The innermost axis divides first: FSDP shards the part that tensor parallelism leaves (DTensor's
    strided sharding).
    """
    for axis in reversed(range(like.device_mesh.ndim)):
        dim = getattr(like.placements[axis], "dim", None)
        if dim is not None:
            chunks, at = value.chunk(like.device_mesh.size(axis), dim), coordinate[axis]
            value = chunks[at] if at < len(chunks) else value.narrow(dim, 0, 0)
    return value


def gather(part: torch.Tensor, like: DTensor, owner: int, ranks: Ranks) -> torch.Tensor | None:
    """Gather the whole tensor on `owner` from each process's `part`; None elsewhere. Collective.

    The parts are on the host, and sent to `owner` only, one of several equal ones.
    """
    mesh = like.device_mesh.mesh
    coordinates = {int(mesh[at]): at for at in product(*map(range, mesh.shape))}
    if owner not in coordinates:  # it belongs to another replica
        return None
    replicated = _axes(like, divided=False)
    senders = {
        rank: at
        for rank, at in coordinates.items()
        if all(at[axis] == coordinates[owner][axis] for axis in replicated)
    }
    if ranks.rank != owner:
        if ranks.rank in senders and part.numel():
            dist.send(part.contiguous(), owner, group=ranks.group)
        return None
    whole = torch.empty(like.shape, dtype=part.dtype)
    for rank, at in senders.items():
        target = shard_at(whole, like, at)
        if rank == owner:
            target.copy_(part)
        elif target.numel():
            received = target.contiguous()  # the target itself, if it is
            dist.recv(received, rank, group=ranks.group)
            if received is not target:
                target.copy_(received)
    return whole


def _axes(like: DTensor, divided: bool) -> list[int]:
    """List the axes of the mesh that divide `like`, or those on which it is replicated."""
    sharded = [hasattr(placement, "dim") for placement in like.placements]
    return [axis for axis, cut in enumerate(sharded) if cut == divided]


def gather_by_device(like: DTensor, owner: int, rank: int) -> torch.Tensor | None:
    """Gather the whole tensor on the host of `owner`; None elsewhere. Collective over its mesh.

    Uses the devices' own groups, which gather on all their ranks, a buffer at a time: only the host
    holds the whole.
    """
    mesh, part = like.device_mesh, local(like).detach()
    coordinates = {int(mesh.mesh[at]): at for at in product(*map(range, mesh.mesh.shape))}
    if owner not in coordinates:
        return None
    own, mine = coordinates[owner], coordinates[rank]
    if any(own[axis] != mine[axis] for axis in _axes(like, divided=False)):
        return None  # another replica
    whole = torch.empty(like.shape, dtype=part.dtype, device="meta" if rank != owner else None)
    divided = _axes(like, divided=True)
    places = [
        range(mesh.size(axis)) if axis in divided else [own[axis]] for axis in range(mesh.ndim)
    ]
    targets = [shard_at(whole, like, at) for at in product(*places)]
    parts = [
        target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
        for target in targets
    ]
    most, step = max(map(len, parts)), max(1, BUFFER_BYTES // (len(parts) * part.itemsize))
    for start in range(0, most, step):
        piece = part.reshape(-1)[start : start + step]
        buffer = torch.zeros(min(step, most - start), dtype=part.dtype, device=mesh.device_type)
        buffer[: len(piece)].copy_(piece)
        for axis in reversed(divided):
            received = buffer.new_empty(mesh.size(axis) * len(buffer))
            dist.all_gather_into_tensor(received, buffer, group=mesh.get_group(axis))
            buffer = received
        for flat, gathered in zip(parts, buffer.view(len(parts), -1), strict=True):
            wanted = flat[start : start + step]
            wanted.copy_(gathered[: len(wanted)])
    for target, flat in zip(targets, parts, strict=True):
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))
    return whole if rank == owner else None
