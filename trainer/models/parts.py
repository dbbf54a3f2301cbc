"""A process's part of a DTensor: cut from the whole tensor, and put together to it on one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.ranks import Ranks


def own_part(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The view of a whole tensor that is this process's part of `like`."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    return part_at(value, like, coordinate)


def part_at(value: torch.Tensor, like: DTensor, coordinate: Sequence[int]) -> torch.Tensor:
    """The view of a whole tensor that is the part of `like` at a coordinate of its mesh.

    The innermost axis divides first: FSDP shards what tensor parallelism has left (DTensor's strided sharding).
    """
    for axis in reversed(range(like.device_mesh.ndim)):
        dim = getattr(like.placements[axis], "dim", None)
        if dim is not None:
            chunks, place = value.chunk(like.device_mesh.size(axis), dim), coordinate[axis]
            value = chunks[place] if place < len(chunks) else value.narrow(dim, 0, 0)
    return value


def gather(part: torch.Tensor, like: DTensor, owner: int, ranks: Ranks) -> torch.Tensor | None:
    """The whole tensor on `owner`, from `part` as each process has it on the host; None elsewhere. Collective.

    Nothing is sent but to `owner`, and of several equal parts only one.
    """
    mesh = like.device_mesh.mesh
    places = {int(mesh[place]): place for place in product(*map(range, mesh.shape))}
    if owner not in places:  # it has another replica
        return None
    divided = [hasattr(placement, "dim") for placement in like.placements]
    senders = {
        rank: place
        for rank, place in places.items()
        if all(cut or a == b for cut, a, b in zip(divided, place, places[owner], strict=True))
    }
    if ranks.rank != owner:
        if ranks.rank in senders and part.numel():
            dist.send(part.contiguous(), owner, group=ranks.group)
        return None
    whole = torch.empty(like.shape, dtype=part.dtype)
    for rank, place in senders.items():
        target = part_at(whole, like, place)
        if rank == owner:
            target.copy_(part)
        elif target.numel():
            received = (
                target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            )
            dist.recv(received, rank, group=ranks.group)
            if received is not target:
                target.copy_(received)
    return whole
