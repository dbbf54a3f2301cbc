"""How many cores an optimizer on the host has, where a launcher gave each of its processes one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainer.run.parents import launchers_above


def share_of_cores(local_world_size: int) -> str | None:
    """Give this process its share of the cores; returns a line about it.

    torchrun and Accelerate set OMP_NUM_THREADS to 1 where nobody has set it, and an Adam on the host then takes as many
    times as long as there are cores. What the launcher itself was started with says whether somebody had.
    """
    if local_world_size < 2 or os.environ.get("OMP_NUM_THREADS") != "1" or not _by_launcher("OMP_NUM_THREADS"):
        return None
    share = len(os.sched_getaffinity(0)) // local_world_size
    if share < 2:
        return None
    torch.set_num_threads(share)
    return f"{share} threads for the optimizer on the CPU, this process's share of the cores; OMP_NUM_THREADS sets it"


def _by_launcher(name: str) -> bool:
    """Whether the launcher above has set a variable that it was not given itself. Only Linux shows that."""
    above = launchers_above(os.getpid())
    try:
        given = Path(f"/proc/{above[-1][1]}/environ").read_bytes().split(b"\0") if above else [f"{name}=".encode()]
    except OSError:
        return False
    return not any(word.startswith(f"{name}=".encode()) for word in given)
