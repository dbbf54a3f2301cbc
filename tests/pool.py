"""Worker processes that stay alive across tests: starting torch and DeepSpeed costs seconds per process.

One pool per world size, gloo on CPU. `pool.run(function, **arguments)` calls a module-level function on every
rank and returns the results in rank order; a hang is an error after `timeout` seconds, and kills the pool.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Pool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *, timeout: float = 180, **arguments: Any) -> list[Any]:
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, arguments))
        results = []
        for rank, (_, pipe) in enumerate(self._workers):
            try:
                if not pipe.poll(timeout):
                    raise TimeoutError(f"rank {rank} of {self.world_size} did not answer in {timeout} s")
                results.append(pipe.recv())
            except (TimeoutError, EOFError) as error:
                self.close()
                raise AssertionError(f"{function.__name__}: {error!r}") from error
        failures = [f"rank {rank}:\n{value}" for rank, (failed, value) in enumerate(results) if failed]
        if failures:
            self.close()  # the ranks may be out of step with one another
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size, port), daemon=True)
            process.start()
            self._workers.append((process, ours))


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    log = tempfile.TemporaryFile("w")
    os.dup2(log.fileno(), 1)
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((False, function(**arguments)))
        except BaseException:  # noqa: BLE001 - it goes to the test as text
            pipe.send((True, traceback.format_exc()))
