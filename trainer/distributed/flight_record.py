"""PyTorch's record of collectives: how many this process has entered, and a file of the last."""

from __future__ import annotations

import hashlib
import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer.storage import Json

KINDS = ("enqueued", "completed")
"""PyTorch's words for collectives that were entered, and that are done."""


class Entered(NamedTuple):
    """How far a process is in the collectives of one of its groups."""

    group: str
    """A name that all members of the group, and no others, have for it."""
    begun: int
    """The number of collectives that it has entered."""
    completed: int
    """The number that it has completed."""
    last: str = ""
    """The last one that it has entered, as "gloo:all_reduce"; empty if none is recorded."""

    @property
    def waits(self) -> bool:
        return self.begun > self.completed

    def joins(self, other: Entered) -> bool:
        """Return True if this member has entered the collective that another one waits in."""
        if self.begun == other.begun:
            return self.last == other.last
        return self.begun > other.begun


def entered() -> tuple[Entered, ...]:
    """Return how far this process is in each of its groups; empty if PyTorch keeps no record."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d
    from torch.distributed.distributed_c10d import _world

    if not dist.is_available() or not dist.is_initialized():
        return ()
    recorded: dict[str, tuple[int, int, str]] = {}
    for record in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with suppress(Exception):  # what a build lacks, and a record that is turned off
            recorded |= _recorded(json.loads(getattr(_distributed_c10d, record)(True, False)))
    if not recorded:
        return ()
    entries = []
    for group, name in _world.pg_names.items():
        members = repr(sorted(_world.pg_group_ranks[group]))
        key = f"{name}-{hashlib.sha256(members.encode()).hexdigest()[:8]}"
        entries.append(Entered(key, *recorded.get(name, (0, 0, ""))))
    return tuple(entries)


def _recorded(record: Json) -> dict[str, tuple[int, int, str]]:
    """Return (entered, completed, last) by the name of the group."""
    records = {}
    for entry in record["entries"]:  # the oldest first
        status = record["pg_status"].get(str(entry["pg_id"]))
        if status is not None and not entry["is_p2p"]:
            begun, completed = (int(status[f"last_{kind}_collective"]) for kind in KINDS)
            # before the first it is -1
            records[entry["process_group"][0]] = begun, max(completed, 0), entry["profiling_name"]
    return records


def write_flight_record(folder: Path, rank: int) -> None:
    """Write this process's last collectives to `folder`, as PyTorch's `torchfrtrace` reads them."""
    from torch._C import _distributed_c10d
    from torch.distributed.distributed_c10d import _world, get_backend

    folder.mkdir(exist_ok=True)
    if get_backend() == "nccl":
        content = _distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
    else:
        record = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
        record["pg_config"] = {  # which gloo's lacks
            name: {"name": name, "desc": group.group_desc, "ranks": str(sorted(ranks))}
            for group, name in _world.pg_names.items()
            for ranks in [_world.pg_group_ranks[group]]
        }
        content = pickle.dumps(record)
    (folder / f"rank-{rank}").write_bytes(content)
