"""The cores of an optimizer on the host, where a launcher gave each process one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainer.run.parents import launchers_above


def share_of_cores(local_world_size: int) -> str | None:
    """Give this process its share of the cores; return a line about it, or None.

    torchrun and Accelerate set OMP_NUM_THREADS to 1 if it is unset, and an Adam on the host is then
    slower by the number of cores. The launcher's own environment shows if the user had set it.
    """
    if local_world_size < 2 or os.environ.get("OMP_NUM_THREADS") != "1" or not _by_launcher("OMP_NUM_THREADS"):
        return None
    share = len(os.sched_getaffinity(0)) // local_world_size
    if share < 2:
        return None
    torch.set_num_threads(share)
    return f"{share} threads for the optimizer on the CPU, this process's share of the cores; OMP_NUM_THREADS sets it"


def _by_launcher(name: str) -> bool:
    """Return True if the launcher above set a variable that it was not given. Only Linux shows that."""
    above = launchers_above(os.getpid())
    try:
        given = Path(f"/proc/{above[-1][1]}/environ").read_bytes().split(b"\0") if above else [f"{name}=".encode()]
    except OSError:
        return False
    return not any(word.startswith(f"{name}=".encode()) for word in given)
