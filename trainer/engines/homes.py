"""Which pipeline stage has each piece of the state, and which rank keeps it when a checkpoint is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from trainer.engines.engine import Observer
from trainer.parallel.mesh import Grid
from trainer.ranks import Ranks
from trainer.state import WEIGHT

Kind = tuple[str, str, tuple[int, ...], torch.dtype]
"""Name, part, shape and dtype of a piece."""


def place_of(grid: Grid | None) -> int:
    """Where in the pipeline this rank stands; without a grid there is no pipeline."""
    return grid.mesh.get_local_rank("pipeline") if grid else 0


def homes(held: Iterable[Kind], grid: Grid | None) -> dict[Kind, int]:
    """What all ranks hold, and at which place of the pipeline: the first that has it. Collective."""
    mine: list[list[Kind]] = [list(held)]
    if grid and grid.layout.pipeline > 1:
        mine = [[] for _ in range(grid.layout.pipeline)]
        dist.all_gather_object(mine, list(held), group=grid.group("pipeline"))
    found: dict[Kind, int] = {}
    for place, kinds in enumerate(mine):
        for kind in kinds:
            found.setdefault(kind, place)
    return found


def owners(found: Mapping[Kind, int], ranks: Ranks, grid: Grid | None) -> dict[str, int]:
    """The rank that keeps each name's pieces: all of a parameter's go to one rank of the stage that has it."""
    stage = ranks.world_size // (grid.layout.pipeline if grid else 1)
    sizes = {kind[0]: math.prod(kind[2]) for kind in found}
    places = {kind[0]: place for kind, place in found.items()}
    candidates = [range(place * stage, (place + 1) * stage) for place in places.values()]
    return dict(zip(sizes, least_loaded(list(sizes.values()), candidates), strict=True))


def least_loaded(sizes: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[int]:
    """For each size, in order, the one of its candidates that has the least so far."""
    loads: dict[int, int] = {}
    chosen = []
    for size, ranks in zip(sizes, candidates, strict=True):
        rank = min(ranks, key=lambda rank: loads.get(rank, 0))
        loads[rank] = loads.get(rank, 0) + size
        chosen.append(rank)
    return chosen


def tell(gradients: Mapping[str, torch.Tensor], grid: Grid | None, observe: Observer) -> None:
    """Tell `observe`, on every rank, the whole gradients of all stages; this rank has those given. Collective."""
    found = homes([(name, WEIGHT, tuple(g.shape), g.dtype) for name, g in gradients.items()], grid)
    for (name, _, shape, dtype), home in found.items():
        value = (
            gradients[name]
            if not grid or home == place_of(grid)
            else torch.empty(shape, dtype=dtype, device=grid.mesh.device_type)
        )
        if grid and grid.layout.pipeline > 1:
            dist.broadcast(value.contiguous(), group=grid.group("pipeline"), group_src=home)
        observe(name, value)
