"""Ranks and world size as launchers set them in the environment, the launcher, and the GPUs.

Does not import torch.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import psutil

NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""The environment of a process for the CPU: CUDA fails in forks of one that looked for GPUs."""
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looks so that it works in forks

LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
MODULES = ("torch.distributed.run", "torch.distributed.launch")
LOOK_SECONDS = 1.0
MOST_LEVELS = 4
"""The most levels of a launcher's processes: script, launcher, runner, shell."""

ACCELERATE = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "FP8_")
"""Prefixes of the variables by which `accelerate launch` tells its library how to train."""
IDLE = ("", "no", "none", "false", "0", "1", "default")
"""Values of those variables that request nothing."""


@dataclass(frozen=True)
class World:
    """The values that torchrun, deepspeed and accelerate set in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def world_of(environment: MutableMapping[str, str]) -> World | None:
    """Read the world that a launcher made; None without a launcher.

    If Slurm's srun started the ranks, `environment` gets what torchrun would set, for libraries.
    """
    if "RANK" not in environment:
        environment.update(from_slurm(environment))
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    world_size = environment["WORLD_SIZE"]
    local_size = environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", world_size))
    local_rank = environment.get("LOCAL_RANK", "0")
    return World(int(environment["RANK"]), int(local_rank), int(world_size), int(local_size))


SLURM = "PROCID LOCALID NODEID JOB_ID STEP_ID STEP_NUM_TASKS STEP_TASKS_PER_NODE STEP_NODELIST"
"""Names after `SLURM_`, with some that only srun sets: a batch script has the others, too."""
PORTS = range(10_000, 30_000)
"""Ports for the rendezvous, below those that Linux gives to outgoing connections by default."""


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set if srun started several ranks; empty in interactive shells."""
    values = [environment.get(f"SLURM_{name}", "") for name in SLURM.split()]
    rank, local_rank, node, job, step, world_size, tasks, nodes = values
    if not all(values) or "SLURM_PTY_PORT" in environment or world_size == "1":
        return {}
    port = PORTS[(int(job) + 1009 * int(step)) % len(PORTS)]
    return {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(tasks)[int(node)]),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def _tasks_per_node(text: str) -> list[int]:
    """Expand a list of tasks per node: 2(x3),1 is 2, 2, 2 and 1."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """Return the first host of a list: gpu[003-005,9],cpu1 begins with gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what a launcher would set for process `rank` of `count` on this machine."""
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


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port of this machine, which Linux gives to nobody else meanwhile.

    On Linux, a socket with SO_REUSEADDR can listen there; other systems may give it away.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = int(reserved.getsockname()[1])
        if sys.platform != "linux":
            reserved.close()
        yield port


def free_port() -> int:
    with reserved_port() as port:
        return port


def is_launcher(arguments: list[str]) -> bool:
    """Return True if a process with these arguments starts ranks, by its program or script."""
    program = Path(arguments[0]).name if arguments else ""
    if program.startswith("python"):
        program = Path(next((word for word in arguments[1:] if not word.startswith("-")), "")).name
    return program in (*LAUNCHERS, *MODULES) or program.startswith("deepspeed.launcher.")


def launchers_above(process: psutil.Process) -> list[psutil.Process]:
    """List the launcher's processes above `process`, nearest first.

    DeepSpeed has two, of which the upper one takes signals without passing them on.
    """
    launchers = []
    with suppress(psutil.Error):
        for parent in process.parents()[:MOST_LEVELS]:
            if not is_launcher(parent.cmdline()):
                break
            launchers.append(parent)
    return launchers


def cant_rejoin(environment: Mapping[str, str]) -> str | None:
    """Return a note if torchrun would restart ranks, but let no new agent in: those of torch 2.15
    publish the address of their store in the first round alone (dynamic_rendezvous.py).
    """
    own = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    several = environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE")
    if own and several and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        hint = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all nodes"
        return f"a node that joins or comes back would end this job: {hint}"
    return None


def leave_with_launcher(own: bool) -> None:
    """Ask this process to stop, by SIGTERM, once its launcher is gone, whatever ended that.

    `own`: the parent is this project's launcher; others are recognised by their command.
    """
    process = psutil.Process()
    if above := process.parents()[:1] if own else launchers_above(process):
        chain = [process, *above]
        threading.Thread(target=_leave_after, args=(chain,), name="launcher", daemon=True).start()


def _leave_after(chain: list[psutil.Process]) -> None:
    with suppress(psutil.Error):
        while all(child.ppid() == parent.pid for child, parent in pairwise(chain)):
            time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def missing_hostfile(pid: int) -> str | None:
    """Return the hostfile named by a `deepspeed` command from process `pid` up, if it is missing.

    DeepSpeed itself would then train on this machine alone and exit with 0.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for command in [process, *process.parents()][:MOST_LEVELS]:
            arguments = command.cmdline()
            named = [after for word, after in pairwise(arguments) if word in ("-H", "--hostfile")]
            prefix = "--hostfile="
            named += [word.removeprefix(prefix) for word in arguments if word.startswith(prefix)]
            if named and any("deepspeed" in argument for argument in arguments):
                return None if Path(named[0]).is_file() else named[0]
    return None


def gpu_count() -> int:
    """Count the NVIDIA GPUs that processes may use, without importing torch (seconds)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return present if visible is None else min(present, _named(visible))


def _named(visible: str) -> int:
    """Count the GPUs that CUDA sees: those before the first invalid name, one if MIG slices."""
    known = re.compile(r"\d+|GPU-[\w-]+|MIG-.+")
    names = list(takewhile(known.fullmatch, map(str.strip, visible.split(","))))
    return min(len(names), 1) if any(name.startswith("MIG-") for name in names) else len(names)


def drop_accelerate(environment: MutableMapping[str, str]) -> str | None:
    """Remove the training settings of `accelerate launch`, which Accelerate would follow.

    Returns a line for the user if one of them requested something, else None.
    """
    names = [name for name in sorted(environment) if name.startswith(ACCELERATE)]
    settings = {name: environment.pop(name) for name in names}
    wanted = [f"{name}={value}" for name, value in settings.items() if value.lower() not in IDLE]
    if not wanted:
        return None
    more = f" and {len(wanted) - 4} more" if len(wanted) > 4 else ""
    shown = ", ".join(wanted[:4]) + more
    return f"ignored, as the JSON says what is trained: {shown} (from accelerate's launcher)"
