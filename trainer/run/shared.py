"""The machines of a run that see the same folder."""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer import checkpoint
from trainer.distributed.ranks import Ranks
from trainer.errors import DiskError, Problem, listed, shared
from trainer.storage import disk_errors

PATIENCE_SECONDS = 10.0
"""Seconds until a network file system shows a machine what another one has written."""


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Raise DiskError, naming the machines, if `folder` is not the same on all as on rank 0.
    Collective.
    """
    if ranks.world_size == 1:
        return
    mark = ranks.on_first(lambda: _leave_mark(folder))
    found = ranks.gather((socket.gethostname(), str(folder.absolute()), _sees(folder / mark)))
    ranks.on_first(lambda: (folder / mark).unlink(missing_ok=True))
    blind = {
        f"rank {rank} on {host} ({place})": None
        for rank, (host, place, sees) in enumerate(found)
        if not sees
    }
    if blind:
        seen = f"what rank 0 on {found[0][0]} writes there is not there for {listed(list(blind))}"
        mend = (
            "Put trainer.run.folder on a file system that they share, as an absolute path, or set "
        )
        mend += (
            "trainer.run.node_local: each machine then keeps all of the run in a folder of its own"
        )
        raise shared(DiskError(Problem(str(folder), seen, "one folder for all machines", mend)))


def kept(folder: Path, ranks: Ranks) -> Ranks:
    """Return the ranks with their folders' keepers: `folder` is each machine's own, or several
    share one. Collective.

    Raises DiskError if it can't be written.
    """
    if ranks.world_size == 1:
        return ranks
    import torch.distributed as dist

    token = ranks.on_first(lambda: uuid.uuid4().hex)
    mark = folder / f".seen-{token}-{ranks.rank}"

    @disk_errors(folder)
    def leave() -> None:
        checkpoint.ensure_writable(folder)
        mark.touch()

    @disk_errors(folder)
    def look() -> int:
        return min(int(path.name.rpartition("-")[2]) for path in folder.glob(f".seen-{token}-*"))

    ranks.on_each(leave)
    keepers = tuple(ranks.on_each(look))
    with suppress(OSError):
        mark.unlink(missing_ok=True)
    if odd := [rank for rank, keeper in enumerate(keepers) if keepers[keeper] != keeper]:
        seen = (
            f"what rank {odd[0]} sees is not what rank {keepers[odd[0]]} sees, which is there "
            "for it"
        )
        raise shared(
            DiskError(Problem(str(folder), seen, "folders that are the same for all who see them"))
        )
    group = dist.new_group(sorted(set(keepers)), backend="gloo")
    return replace(ranks, keepers=keepers, among_keepers=group)


def _leave_mark(folder: Path) -> str:
    name = f".seen-{uuid.uuid4().hex}"
    with disk_errors(folder):
        (folder / name).touch()
    return name


def _sees(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if path.name in os.listdir(
                path.parent
            ):  # it asks the server, which a look at the name may not
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
