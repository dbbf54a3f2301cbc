"""Whether all machines of a run see its folder."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

from trainer.distributed.ranks import Ranks
from trainer.errors import DiskError, Problem, listed, shared
from trainer.storage import disk_errors

PATIENCE_SECONDS = 10.0
"""How long a network's file system may show a machine what was there before."""


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Collective. Raises DiskError that names the machines where `folder` is another one than that of rank 0."""
    if ranks.world_size == 1:
        return
    mark = ranks.on_first(lambda: _leave_mark(folder))
    found = ranks.gather((socket.gethostname(), str(folder.absolute()), _sees(folder / mark)))
    ranks.on_first(lambda: (folder / mark).unlink(missing_ok=True))
    blind = {f"rank {rank} on {host} ({place})": None for rank, (host, place, sees) in enumerate(found) if not sees}
    if blind:
        seen = f"what rank 0 on {found[0][0]} writes there is not there for {listed(list(blind))}"
        mend = "Put trainer.run.folder on a file system that they share, as an absolute path"
        raise shared(DiskError(Problem(str(folder), seen, "one folder for all machines", mend)))


def _leave_mark(folder: Path) -> str:
    name = f".seen-{uuid.uuid4().hex}"
    with disk_errors(folder):
        (folder / name).touch()
    return name


def _sees(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if path.name in os.listdir(path.parent):  # which asks the server, where a look at the name may not
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
