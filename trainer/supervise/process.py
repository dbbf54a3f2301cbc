"""This process joins the run: its device, its process group, and the output of its libraries."""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import re
import resource
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from trainer.config import Config
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, Problem
from trainer.storage import installed, private_folder
from trainer.supervise import meeting
from trainer.supervise.output import Signs
from trainer.supervise.watchdog.no_watch import NoWatch
from trainer.supervise.watchdog.watch import Watch
from trainer.supervise.world import World, launchers_above

_FILES = 65536
"""The number of files that a process may open at once, if the system allows as many."""
COMPILE_WORKERS = 32
"""The most processes that compile for a rank: PyTorch's own bound."""
TIMEOUT = datetime.timedelta(minutes=30)
"""The timeout of collectives: longer than any step or save; the watchdog is quicker."""


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


def join(config: Config, world: World, say: meeting.Say = lambda line: None) -> Machine:
    """Choose this process's device, and join the group of all ranks. Collective.

    `say` is called with notes on missing ranks. Raises ConfigError if there are too few GPUs, the
    ranks don't meet in time, or machines run different numbers of processes.
    """
    device = _device(config.trainer.device, world)
    cuda = device.type == "cuda"
    if cuda:
        grow_segments()
        torch.cuda.set_device(device)
    # tokenizers warn in forks after their use, unless it is set
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if world.local_world_size > 1:
        # else each rank would start as many workers of the compiler as the machine has cores
        workers = max(1, min(COMPILE_WORKERS, cores() // world.local_world_size))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))
    # DeepSpeed and Accelerate take it for the number of the GPU
    os.environ["LOCAL_RANK"] = str(device.index if cuda else world.local_rank)
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    place_for_operators()
    set_up_groups()
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
        ranks = Ranks(world.rank, world.world_size).on_host()
        check_even(world.local_world_size, ranks)
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        hint = "Start fewer, or give each its own (CUDA_VISIBLE_DEVICES)"
        raise _crowded("several processes on one GPU", hint) from error
    return Machine(device, ranks, world.local_world_size)


def _device(section: str, world: World) -> torch.device:
    """Return the device that `trainer.device` means. Raises ConfigError with too few GPUs."""
    if section != "cuda" and (section != "auto" or not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1:  # as with Slurm's --gpus-per-task=1: each process sees its own
        return torch.device("cuda", 0)
    if gpus < world.local_world_size:
        actual = f"{world.local_world_size} for {gpus} GPUs"
        raise _crowded(actual, 'Start fewer, or set trainer.device="cpu"')
    return torch.device("cuda", world.local_rank)


def _crowded(actual: str, hint: str) -> ConfigError:
    expected = "at most one process per GPU"
    return ConfigError(Problem("processes on this machine", actual, expected, hint))


def _store(world: World, say: meeting.Say) -> dist.Store:
    """Return the store of this start once all ranks are there, else raise ConfigError."""
    if world.world_size == 1:
        return dist.HashStore()
    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        actual = f"RANK={world.rank} with MASTER_ADDR={host!r} and MASTER_PORT={port!r}"
        expected = "a host and a port, as a launcher sets them"
        raise ConfigError(Problem("environment", actual, expected))
    if world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = meeting.serve(host, int(port), TIMEOUT)
    else:
        store = meeting.reach(host, int(port), world.rank, TIMEOUT, say)
    return meeting.session(store, world.rank, world.world_size, meeting.MEET_SECONDS, say)


def grow_segments() -> None:
    """Have CUDA's allocator extend segments, so that changing sizes leave fewer gaps.

    Settings in the environment stand as they are. Before the first allocation.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def set_up_groups() -> None:
    """Have gloo connect two ranks when one first sends to the other, and collectives recorded.

    A group then takes a rank some 2 log2(ranks) sockets, and not one for each rank; the process
    with the store has two of each rank, and so may open more than the usual 1,024 files. The record
    is PyTorch 2.15's default. Settings in the environment stand as they are.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError):  # of macOS, which has a limit beyond the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


def place_for_operators() -> None:
    """Choose a folder for the operators that DeepSpeed compiles in this environment.

    Environments that shared one would recompile each other's. If the home can't be written, the
    folder is among temporary files.
    """
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    # "10.0a", as in NVIDIA's containers, fails in DeepSpeed, which can look at the GPUs itself
    if not all(re.fullmatch(r"\d+\.\d+(\+PTX)?", each) for each in architectures):
        del os.environ["TORCH_CUDA_ARCH_LIST"]
    if "TORCH_EXTENSIONS_DIR" in os.environ or not installed("deepspeed"):
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


def check_even(size: int, ranks: Ranks) -> None:
    """Raise ConfigError unless all machines run equally many processes. Collective."""
    first = ranks.send(0, size)
    if odd := ranks.lowest(size if size != first else None):
        actual = f"{first} on that of rank 0, {odd[1]} on that of rank {odd[0]}"
        hint = "Start as many on each (--nproc-per-node, slots of the hostfile)"
        expected = "equally many on all"
        raise ConfigError(Problem("processes on a machine", actual, expected, hint)).share()


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "meshloom"
    except RuntimeError:  # a user without a home, as in a container
        return private_folder()


def cores() -> int:
    """Return the number of cores that this process may use; macOS can't say, and has all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(local_world_size: int) -> str | None:
    """Give this process its share of the cores; return a line about it, or None.

    torchrun and Accelerate set OMP_NUM_THREADS to 1 if it is unset, and an Adam on the host is then
    slower by the number of cores. The launcher's own environment shows if the user had set it.
    """
    single = os.environ.get("OMP_NUM_THREADS") == "1" and _set_by_launcher("OMP_NUM_THREADS")
    if local_world_size < 2 or not single:
        return None
    share = cores() // local_world_size
    if share < 2:
        return None
    torch.set_num_threads(share)
    origin = "this process's share of the cores; OMP_NUM_THREADS sets it"
    return f"{share} threads for the optimizer on the CPU, {origin}"


def _set_by_launcher(name: str) -> bool:
    """Return True if the launcher above set a variable that it was not given itself."""
    above = launchers_above(psutil.Process())
    try:
        return bool(above) and name not in above[-1].environ()
    except psutil.Error:
        return False


def unheard() -> int:
    """Discard standard output and warnings; return a descriptor of the former standard output."""
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
