"""This process among those of the run: its device, its process group, and the output of its
libraries.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.config import Config
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, Problem
from trainer.storage import private_folder
from trainer.supervise import meeting
from trainer.supervise.notes import notes_of
from trainer.supervise.output import Signs
from trainer.supervise.watch import NoWatch, Watch
from trainer.supervise.world import World, launchers_above

TIMEOUT = datetime.timedelta(minutes=30)
"""The timeout of collectives, longer than any step or save; a lost rank is detected then at the
latest.
"""


@dataclass(frozen=True)
class Machine:
    """The device and the ranks that this process runs on."""

    device: torch.device
    ranks: Ranks
    local_world_size: int | None = None
    """The number of processes on this machine; None in a run of one process."""
    watch: Watch | NoWatch = field(default_factory=NoWatch)
    """The watchdog, to which this process reports its phases."""
    signs: Signs = field(default_factory=Signs)
    """Shows the user what this process does before the first step."""


def join(config: Config, world: World, say: Callable[[str], None] = lambda line: None) -> Machine:
    """Choose this process's device, and join all processes' group; `say` is called with a note on
    missing ranks.
    """
    section = config.trainer.device
    cuda = section == "cuda" or (section == "auto" and torch.cuda.is_available())
    own = (
        cuda and torch.cuda.device_count() == 1
    )  # as with Slurm's --gpus-per-task=1: each process sees its own
    if cuda and not own and torch.cuda.device_count() < world.local_world_size:
        raise ConfigError(
            Problem(
                "processes on this machine",
                f"{world.local_world_size} for {torch.cuda.device_count()} GPUs",
                "at most one process per GPU",
                'Start fewer, or set trainer.device="cpu"',
            )
        )
    index = 0 if own else world.local_rank
    device = torch.device("cuda", index) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # set for forks after use, which warn otherwise
    os.environ["LOCAL_RANK"] = str(
        index
    )  # DeepSpeed and Accelerate take it for the number of the GPU
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    place_for_operators()
    try:
        if not dist.is_initialized():  # by an earlier call of the same script
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=_store(world, say),
                rank=world.rank,
                world_size=world.world_size,
                timeout=TIMEOUT,
                device_id=device if cuda else None,
            )
        ranks = Ranks(world.rank, world.world_size)
        sizes = ranks.gather(world.local_world_size)
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        actual, hint = (
            "several processes on one GPU",
            "Start fewer, or give each its own (CUDA_VISIBLE_DEVICES)",
        )
        raise ConfigError(
            Problem("processes on this machine", actual, "at most one process per GPU", hint)
        ) from error
    ranks.on_first(lambda: _check_even(sizes))
    return Machine(device, ranks, world.local_world_size)


def _store(world: World, say: Callable[[str], None]) -> Any:
    """Return the rendezvous store, of torchrun's agent or rank 0. Raises ConfigError if ranks don't
    come.
    """
    if world.world_size == 1:
        return dist.HashStore()
    host, port, notes = (
        os.environ.get("MASTER_ADDR"),
        os.environ.get("MASTER_PORT", ""),
        notes_of(os.environ),
    )
    if not host or not port.isdecimal():
        actual = f"RANK={world.rank} with MASTER_ADDR={host!r} and MASTER_PORT={port!r}"
        raise ConfigError(
            Problem("environment", actual, "a host and a port, as a launcher sets them")
        )
    if world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = meeting.serve(host, 0 if notes else int(port), TIMEOUT)
        if notes:
            notes.write_port(store.port)
    else:
        listens = (
            int(port) if notes is None else notes.await_port(meeting.MEET_SECONDS) or int(port)
        )
        store = meeting.reach(host, listens, world.rank, TIMEOUT, say)
    os.environ["MASTER_PORT"] = str(store.port)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # which outlives the ranks
        store = meeting.session(store, world.rank, world.world_size, meeting.MEET_SECONDS, say)
    meeting.await_all(store, world.rank, world.world_size, say)
    return store


def place_for_operators() -> None:
    """Choose a folder for each environment's compiled operators: else environments would recompile
    each other's.

    Compilers get the environment's paths. If the home can't be written, the folder is elsewhere.
    """
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return
    versions = [torch.__version__, version("deepspeed"), sys.version, sys.prefix]
    name = f"operators-{hashlib.sha256(repr(versions).encode()).hexdigest()[:12]}"
    folder = cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder if usable else private_folder() / name)


def _check_even(sizes: Sequence[int]) -> None:
    """Raise ConfigError unless all machines run equally many processes: each would build another
    mesh.
    """
    if len(set(sizes)) > 1:
        found = ", ".join(
            f"{size} on that of rank {sizes.index(size)}" for size in dict.fromkeys(sizes)
        )
        hint = "Start as many on each (--nproc-per-node, slots of the hostfile)"
        raise ConfigError(Problem("processes on a machine", found, "equally many on all", hint))


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "meshloom"
    except RuntimeError:  # a user without a home, as in a container
        return private_folder()


def has_bf16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def share_of_cores(local_world_size: int) -> str | None:
    """Give this process its share of the cores; return a line about it, or None.

    torchrun and Accelerate set OMP_NUM_THREADS to 1 if it is unset, and an Adam on the host is then
    slower by the number of cores. The launcher's own environment shows if the user had set it.
    """
    if (
        local_world_size < 2
        or os.environ.get("OMP_NUM_THREADS") != "1"
        or not _by_launcher("OMP_NUM_THREADS")
    ):
        return None
    share = len(os.sched_getaffinity(0)) // local_world_size
    if share < 2:
        return None
    torch.set_num_threads(share)
    return (
        f"{share} threads for the optimizer on the CPU, this process's share of the cores; "
        "OMP_NUM_THREADS sets it"
    )


def _by_launcher(name: str) -> bool:
    """Return True if the launcher above set a variable that it was not given. Only Linux shows
    that.
    """
    above = launchers_above(os.getpid())
    try:
        given = (
            Path(f"/proc/{above[-1][1]}/environ").read_bytes().split(b"\0")
            if above
            else [f"{name}=".encode()]
        )
    except OSError:
        return False
    return not any(word.startswith(f"{name}=".encode()) for word in given)


def unheard() -> int:
    """Discard the output and warnings of libraries from now on; return a descriptor of the former
    standard output.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    terminal = os.dup(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return terminal


def quiet_libraries() -> None:
    """Turn off libraries' progress bars, and warnings that the user can do nothing about."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
