"""Where this process stands among the run's processes, and how `python launch/train.py` starts them itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainer.errors import Preempted
from trainer.signals import StopSignals

GRACE_SECONDS = 2.0
"""How long the others may take to end by themselves when one process has failed."""


@dataclass(frozen=True)
class World:
    """What torchrun, deepspeed and accelerate say through the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def world_of(environment: Mapping[str, str]) -> World | None:
    """The world that a launcher made; None when there was no launcher."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    world_size = int(environment["WORLD_SIZE"])
    return World(
        rank=int(environment["RANK"]),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        world_size=world_size,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", world_size))),
    )


def gpu_count() -> int:
    """NVIDIA GPUs that processes may use, without importing torch (seconds)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))


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


def start(count: int, arguments: Sequence[str]) -> int:
    """Run this script once per process; returns the exit code of the first that failed, else 0.

    When one fails, the others get `GRACE_SECONDS` and are then ended: no process is left behind. Signals go to all;
    that one of them alone was asked to stop is told to the others.
    """
    port = free_port()
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: object = None) -> None:
        received.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    for number in (*StopSignals.NUMBERS, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, forward)
    for rank in range(count):
        if not received:
            environment = {**os.environ, **environment_of(rank, count, port)}
            # a session of its own, so that Ctrl-C comes once, from here
            children.append(subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True))
    failed = Preempted.exit_code if len(children) < count else 0
    while any(child.poll() is None for child in children) and not failed:
        failed = next((child.returncode for child in children if child.poll() not in (None, 0)), 0)
        time.sleep(0.05)
    if len(received) == 1 and received[0] in StopSignals.NUMBERS and failed in (-received[0], 128 + received[0]):
        failed = Preempted.exit_code  # it was so young that it knew no signals yet
    _await(children)
    if failed == Preempted.exit_code:
        forward(signal.SIGTERM)
        _await(children)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
    failed = failed or next((child.returncode for child in children if child.returncode), 0)
    return 128 - failed if failed < 0 else failed


def _await(children: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)


def missing_hostfile(pid: int) -> str | None:
    """The hostfile that the `deepspeed` command above process `pid` was given and that does not exist.

    DeepSpeed itself then trains on this machine alone and exits with 0. Only Linux shows other processes' arguments.
    """
    for _ in range(4):  # script, launcher, runner, shell
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return None
        named = [after for word, after in pairwise(arguments) if word in ("-H", "--hostfile")]
        named += [word.partition("=")[2] for word in arguments if word.startswith("--hostfile=")]
        if named and any("deepspeed" in argument for argument in arguments):
            return None if Path(named[0]).is_file() else named[0]
    return None
