"""The rendezvous of a run's processes: a store on rank 0's machine that listens on no more addresses than needed."""

from __future__ import annotations

import datetime
import errno
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from trainer.errors import ConfigError, Problem, listed

REACH_SECONDS = 60.0
"""Seconds in which rank 0's machine must answer at all: its process may still be importing."""
MEET_SECONDS = 600.0
"""Seconds in which all ranks must come: programs are loaded over slow networks."""
TELL_SECONDS = 20.0
"""Seconds between messages that say who is missing."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen on this machine's address that `host` names, or on all if it names none, as behind a load balancer.

    Raises ConfigError if the port is taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        family, kind, address = socket.AF_INET, socket.SOCK_STREAM, ("", port)
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for target in (address, ("", port)):
        try:
            bound.bind(target)
            bound.listen(4096)
            return bound
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                seen = f"another program listens on {host}:{port}"
                mend = "Give the launcher another port (--master-port, MASTER_PORT)"
                raise ConfigError(Problem("rendezvous", seen, "a free port", mend)) from error
    bound.close()
    raise ConfigError(Problem("rendezvous", f"{host}:{port} can't be listened on", "an address of this machine"))


def serve(host: str, port: int, timeout: datetime.timedelta) -> Any:
    """Serve the store from this process. Raises ConfigError as `listening_socket` does."""
    bound = listening_socket(host, port)
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": bound.detach()}
    return dist.TCPStore(host, port or bound_port(options["master_listen_fd"]), None, timeout=timeout, **options)


def bound_port(descriptor: int) -> int:
    with socket.socket(fileno=socket.dup(descriptor)) as copy:
        return int(copy.getsockname()[1])


def reach(host: str, port: int, rank: int, timeout: datetime.timedelta, say: Callable[[str], None]) -> Any:
    """Connect to the store that rank 0, or the launcher, serves.

    Raises ConfigError after a minute if a machine can't be reached; one that refuses may not have
    started its process yet, and gets as long as the other ranks.
    """
    begun = told = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return dist.TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=timeout)
        except (OSError, dist.DistError) as error:
            seen, refused = str(error), isinstance(error, ConnectionRefusedError)
        now = time.monotonic()
        here = f"rank {rank} on {socket.gethostname()} can't reach rank 0 at {host}:{port}"
        if now - begun > (MEET_SECONDS if refused else REACH_SECONDS):
            mend = "Look at that machine's log, its name (MASTER_ADDR) and the firewall between them"
            raise ConfigError(Problem("rendezvous", f"{here}: {seen}", f"an answer within {now - begun:.0f} s", mend))
        if now - told > REACH_SECONDS:
            told = now
            say(f"{here} for {now - begun:.0f} s: {seen}")
        time.sleep(0.2)


def await_all(store: Any, rank: int, world_size: int, say: Callable[[str], None]) -> Mapping[int, str]:
    """Wait for all ranks, saying who is missing; return the host of each. Raises ConfigError if some don't come."""
    store.set(f"meshloom/host/{rank}", socket.gethostname())
    begun = told = time.monotonic()
    missing = list(range(world_size))
    while missing := [other for other in missing if not store.check([f"meshloom/host/{other}"])]:
        now = time.monotonic()
        if now - begun > MEET_SECONDS:
            seen = f"{len(missing)} of {world_size} ranks did not come: {listed([f'rank {r}' for r in missing])}"
            raise ConfigError(
                Problem("rendezvous", seen, f"all within {MEET_SECONDS:.0f} s", "Look at the logs of their machines")
            )
        if now - told > TELL_SECONDS:
            told = now
            say(f"waiting for {listed([f'rank {other}' for other in missing])} of {world_size} for {now - begun:.0f} s")
        time.sleep(0.05)
    return {other: store.get(f"meshloom/host/{other}").decode() for other in range(world_size)}
