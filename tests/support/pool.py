"""Worker processes that stay alive across tests, forked from one server that has imported torch and
DeepSpeed.

Importing them costs each process seconds and 400 MB of its own; a fork costs neither. Gloo on CPU,
one world size alive at a time. `pool.run(function, **arguments)` calls a module-level function on
every rank and returns the results in rank order; a hang is an error after `timeout` seconds, and
kills the pool.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.warm import PRELOADED
from trainer.supervise.world import environment_of, reserved_port


class Pools:
    """The pool of each world size: `pools[4]`. One is open at a time, to save memory."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._open = Pool(0)

    def __getitem__(self, world_size: int) -> Pool:
        if self._open.world_size != world_size:
            self._open.close()
            self._open = Pool(world_size, self._backend)
        return self._open

    def close(self) -> None:
        self._open.close()


class Pool:
    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._backend = backend
        self._workers: list[tuple[Any, Connection]] = []
        self._port = ExitStack()
        """Keeps the port of the pool from others."""

    def run(
        self, function: Callable[..., Any], *, timeout: float = 400, **arguments: Any
    ) -> list[Any]:
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, arguments))
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size and time.monotonic() < deadline:
            open_pipes = {
                pipe: rank for rank, (_, pipe) in enumerate(self._workers) if rank not in results
            }
            for pipe in wait(list(open_pipes), timeout=1):
                try:
                    results[open_pipes[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._workers[open_pipes[pipe]][0]
                    process.join(5)
                    results[open_pipes[pipe]] = (
                        True,
                        f"the process died (exit code {process.exitcode})",
                    )
                if results[open_pipes[pipe]][
                    0
                ]:  # the others may be waiting for this rank in a collective
                    deadline = min(deadline, time.monotonic() + 3)
        for rank in range(self.world_size):
            results.setdefault(rank, (True, f"no answer from {function.__name__}"))
        failures = [
            f"rank {rank}:\n{value}" for rank, (failed, value) in sorted(results.items()) if failed
        ]
        if failures:
            self.close()  # the ranks may be out of step with one another
            raise AssertionError("\n".join(failures))
        return [results[rank][1] for rank in range(self.world_size)]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []
        self._port.close()

    def _start(self) -> None:
        # CUDA can't be used in a fork of a process that has looked for it, as DeepSpeed's import does
        context = multiprocessing.get_context("spawn" if self._backend == "nccl" else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = self._port.enter_context(reserved_port())
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, port, self._backend),
                daemon=True,
            )
            process.start()
            self._workers.append((process, ours))


def machine_here() -> Any:
    """Return the `Machine` of this rank of a pool."""
    import torch
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks
    from trainer.engines import Machine

    return Machine(torch.device("cpu"), Ranks(dist.get_rank(), dist.get_world_size()))


def _serve(pipe: Connection, rank: int, world_size: int, port: int, backend: str) -> None:
    os.environ |= {**environment_of(rank, world_size, port), "OMP_NUM_THREADS": "1"}
    log = tempfile.TemporaryFile("w")
    os.dup2(log.fileno(), 1)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    from trainer.supervise.process import place_for_operators

    place_for_operators()
    device = None
    if backend == "nccl":  # with a GPU for each rank
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        backend, rank=rank, world_size=world_size, device_id=device
    )
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((False, function(**arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
