"""The rendezvous of a run's ranks: a store on rank 0's machine, and who has come to it."""

from __future__ import annotations

import datetime
import errno
import socket
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from trainer.errors import ConfigError, Problem, listed

REACH_SECONDS = 60.0
"""Seconds in which rank 0's machine must answer at all: its process may still be importing."""
MEET_SECONDS = 600.0
"""Seconds in which all ranks must come: programs are loaded over slow networks."""
TELL_SECONDS = 20.0
"""Seconds between messages that say who is missing."""
POLL_SECONDS = 0.02
Say = Callable[[str], None]


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen on this machine's address that `host` names, and on no other, if it names one.

    Else, as behind a load balancer, listen on all. Raises ConfigError if the port is taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        family = socket.AF_INET
        address = ("", port)
    for target in (address, ("", port)):
        try:
            return socket.create_server(
                target, family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                actual = f"another program listens on {host}:{port}"
                hint = "Give the launcher another port (--master-port, MASTER_PORT)"
                raise ConfigError(Problem("rendezvous", actual, hint=hint)) from error
    actual = f"{host}:{port} can't be listened on"
    raise ConfigError(Problem("rendezvous", actual, "an address of this machine"))


def serve(host: str, port: int, timeout: datetime.timedelta) -> dist.Store:
    """Serve the store from this process. Raises ConfigError as `listening_socket` does."""
    bound = listening_socket(host, port)
    port = bound.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=bound.detach(),
    )


def reach(host: str, port: int, rank: int, timeout: datetime.timedelta, say: Say) -> dist.Store:
    """Connect to the store that rank 0, or the launcher, serves.

    Raises ConfigError after a minute if a machine can't be reached; one that refuses may not have
    started its process yet, and gets as long as the other ranks.
    """
    here = f"rank {rank} on {socket.gethostname()} can't reach rank 0 at {host}:{port}"
    begun = reported = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return dist.TCPStore(
                host, port, None, is_master=False, timeout=timeout, wait_for_workers=False
            )
        except (OSError, dist.DistError) as error:
            actual = str(error)
            refused = isinstance(error, ConnectionRefusedError)
        now = time.monotonic()
        if now - begun > (MEET_SECONDS if refused else REACH_SECONDS):
            hint = "Look at its log, its name (MASTER_ADDR) and the firewall between the machines"
            raise _late(f"{here}: {actual}", "an answer", now - begun, hint)
        if now - reported > REACH_SECONDS:
            reported = now
            say(f"{here} for {now - begun:.0f} s: {actual}")
        time.sleep(0.2)


def session(
    store: dist.Store, rank: int, world_size: int, patience: float, say: Say = lambda line: None
) -> dist.Store:
    """Wait for all ranks; return the part of `store` that belongs to this start alone. Collective.

    The agent of torchrun keeps its store when it restarts the ranks, with the addresses of those
    that died, and its nodes do not agree on the number of the start. So rank 0 makes up a name, and
    answers each rank's request with it: a rank's own word, which comes back, proves that the answer
    is not an old one. Raises ConfigError if ranks don't come in `patience` seconds; meanwhile rank
    0 calls `say` with those that are missing.
    """
    word = uuid.uuid4().hex
    if rank != 0:
        return dist.PrefixStore(f"meshloom/{_ask(store, rank, word, patience)}", store)

    def came(other: int) -> bool:
        if store.check([f"meshloom/asks/{other}"]):
            answer = f"{store.get(f'meshloom/asks/{other}').decode()} {word}"
            store.set(f"meshloom/told/{other}", answer)
        return bool(store.check([f"meshloom/came/{word}/{other}"]))

    begun = reported = time.monotonic()
    missing = list(range(1, world_size))
    while missing := [other for other in missing if not came(other)]:
        now = time.monotonic()
        names = listed([f"rank {other}" for other in missing])
        if now - begun > patience:
            actual = f"{len(missing)} of {world_size} ranks did not come: {names}"
            raise _late(actual, "all", patience)
        if now - reported > TELL_SECONDS:
            reported = now
            say(f"waiting for {names} of {world_size} for {now - begun:.0f} s")
        time.sleep(POLL_SECONDS)
    store.set(f"meshloom/all/{word}", "")
    return dist.PrefixStore(f"meshloom/{word}", store)


def _ask(store: dist.Store, rank: int, word: str, patience: float) -> str:
    """Return the name of this start, which rank 0 sends with this rank's `word`, once all came."""
    store.set(f"meshloom/asks/{rank}", word)
    deadline = time.monotonic() + patience
    name = ""
    while time.monotonic() < deadline:
        if name and store.check([f"meshloom/all/{name}"]):
            return name
        if not name and store.check([f"meshloom/told/{rank}"]):
            answered, _, named = store.get(f"meshloom/told/{rank}").decode().partition(" ")
            if answered == word:
                name = str(named)
                store.set(f"meshloom/came/{name}/{rank}", "")
        time.sleep(POLL_SECONDS)
    heard = "met rank 0, but not all the others came" if name else "heard nothing from rank 0"
    raise _late(f"rank {rank} {heard}", "all", patience)


def _late(
    actual: str, expected: str, seconds: float, hint: str = "Look at the logs of their machines"
) -> ConfigError:
    return ConfigError(Problem("rendezvous", actual, f"{expected} within {seconds:.0f} s", hint))
