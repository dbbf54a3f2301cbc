"""A check before the first step that replicas hold the same parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer.distributed.dtensor import local
from trainer.distributed.ranks import Ranks
from trainer.errors import NumericsError, Problem
from trainer.parallel.parallel_mesh import REDUCTIONS, ParallelMesh, ranks_along


def check_replicas(modules: Sequence[nn.Module], mesh: ParallelMesh, ranks: Ranks) -> None:
    """Raise NumericsError, on all ranks, unless the ranks of each `replica` hold the same parameters. Collective."""
    with torch.no_grad():
        sums = torch.stack([_checksum(local(p)) for module in modules for p in module.parameters()])
    found = ranks.gather([float(value) for value in sums])
    for first, *others in ranks_along(mesh.device_mesh, REDUCTIONS["replica"]):
        for rank in others:
            if found[rank] != found[first]:
                seen = f"other initial values on rank {rank} than on rank {first}"
                raise NumericsError(Problem("replicas", seen, "the same on all replicas"))


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Sum the values in float64, a part at a time: this is where a rank's memory is fullest."""
    return torch.stack([part.sum(dtype=torch.float64) for part in values.reshape(-1).split(1 << 20)]).sum()
