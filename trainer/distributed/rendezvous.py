"""Ranks that wait for one another over the store that they met by: no collective, and so no limit of its time."""

from __future__ import annotations

import time
from typing import Any

LONGEST_PAUSE = 1.0


def await_all_done(rank: int, world_size: int) -> None:
    """Wait until every rank has come here as often as this one; the watcher ends a run in which one can't any more.

    Raises RuntimeError where the store is gone, and with it the rank that has it.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    try:
        number = store.add(f"meshloom/rendezvous/{rank}", 1)
        key = f"meshloom/rendezvous/done/{number}"
        done, pause = store.add(key, 1), 0.005
        while done < world_size:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            done = store.add(key, 0)
    except RuntimeError as error:
        raise RuntimeError(f"the store of the ranks is gone, and so is the rank that has it: {error}") from error
