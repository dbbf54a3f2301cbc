"""A part of the ranks' store that belongs to one start of the run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from trainer.errors import ConfigError, Problem, listed

POLL_SECONDS, TELL_SECONDS = 0.02, 20.0


def session(
    store: Any, rank: int, world_size: int, patience: float, say: Callable[[str], None] = lambda line: None
) -> Any:
    """Return the part of `store` that belongs to this start alone. Collective.

    The agent of torchrun keeps its store when it restarts the ranks, with the addresses of those that died, and
    its nodes do not agree on the number of the start. So rank 0 makes up a name, and answers each rank's request
    with it: a rank's own word, which comes back, proves that the answer is not an old one. Raises ConfigError if
    ranks don't come in `patience` seconds; meanwhile `say` is called with those that are missing.
    """
    import torch.distributed as dist

    word, deadline = uuid.uuid4().hex, time.monotonic() + patience
    name = _name_all(store, word, world_size, deadline, say) if rank == 0 else _ask(store, rank, word, deadline)
    return dist.PrefixStore(f"meshloom/{name}", store)


def _name_all(store: Any, name: str, world_size: int, deadline: float, say: Callable[[str], None]) -> str:
    heard: dict[int, bytes] = {}
    told = time.monotonic()
    while store.add(f"meshloom/came/{name}", 0) < world_size - 1:
        for rank in range(1, world_size):
            if store.check([f"meshloom/asks/{rank}"]) and (word := store.get(f"meshloom/asks/{rank}")) != heard.get(
                rank
            ):
                heard[rank] = word
                store.set(f"meshloom/told/{rank}", f"{word.decode()} {name}")
        missing = listed([f"rank {rank}" for rank in range(1, world_size) if rank not in heard])
        if time.monotonic() > deadline:
            raise _late(f"{world_size - 1 - len(heard)} of {world_size} ranks did not come: {missing}")
        if missing and time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            say(f"waiting for {missing} of {world_size}")
        time.sleep(POLL_SECONDS)
    return name


def _ask(store: Any, rank: int, word: str, deadline: float) -> str:
    store.set(f"meshloom/asks/{rank}", word)
    while True:
        if store.check([f"meshloom/told/{rank}"]):
            heard, _, name = store.get(f"meshloom/told/{rank}").decode().partition(" ")
            if heard == word:
                store.add(f"meshloom/came/{name}", 1)
                return str(name)
        if time.monotonic() > deadline:
            raise _late(f"rank {rank} heard nothing of rank 0")
        time.sleep(POLL_SECONDS)


def _late(seen: str) -> ConfigError:
    return ConfigError(Problem("rendezvous", seen, "all ranks in time", "Look at the logs of their machines"))
