"""Where this process stands among the run's processes, as the environment says it. Knows no torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """What torchrun, deepspeed and accelerate say through the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def world_of(environment: MutableMapping[str, str]) -> World | None:
    """The world that a launcher made; None when there was no launcher.

    Where Slurm's srun started the ranks, `environment` is given what torchrun would have set: libraries look there.
    """
    if "RANK" not in environment:
        environment.update(from_slurm(environment))
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    world_size = int(environment["WORLD_SIZE"])
    return World(
        rank=int(environment["RANK"]),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        world_size=world_size,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", world_size))),
    )


SLURM = ("PROCID", "LOCALID", "NODEID", "JOB_ID", "STEP_ID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "STEP_NODELIST")
"""Of the names after `SLURM_`, those that only srun sets: a batch script has some of them, too."""
PORTS = range(10_000, 30_000)
"""Ports to meet at: no system hands these out for outgoing connections."""


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, where srun started several ranks; nothing elsewhere, as in a shell of its own."""
    found = [environment.get(f"SLURM_{name}", "") for name in SLURM]
    if not all(found) or "SLURM_PTY_PORT" in environment or found[5] == "1":
        return {}
    rank, local_rank, node, job, step, world_size, tasks, nodes = found
    return {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(tasks)[int(node)]),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(PORTS[(int(job) + 1009 * int(step)) % len(PORTS)])),
    }


def _tasks_per_node(text: str) -> list[int]:
    """2(x3),1: 2, 2, 2 and 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """gpu[003-005,9],cpu1: gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What a launcher would set for process `rank` of `count` on this machine."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
