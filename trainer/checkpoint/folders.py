"""Run folders that each machine has for itself: files of one are copied to the others."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.manifest import read_manifest, write_manifest
from trainer.checkpoint.safetensors_stream import FileRecord
from trainer.errors import DiskError, Problem
from trainer.storage import disk_errors, flush, rename_folder

if TYPE_CHECKING:
    from trainer.distributed.ranks import Ranks

PARTIAL = ".partial"
"""The end of the name of an unfinished folder."""
CHUNK = 16 * 2**20
"""Bytes sent over the network at a time."""


def spread(
    folder: Path | None, records: Mapping[str, FileRecord], writers: Mapping[str, int], ranks: Ranks
) -> None:
    """Copy each file of `records` from the folder of its writer to all others. Collective.

    `folder` is the one that this rank sees; None if it wants no copy. Copies are flushed, and have
    the hash of their record. Raises DiskError everywhere, after all were sent.
    """
    if len(set(ranks.keepers)) < 2:
        return

    def copy() -> None:
        failures = []
        for name in sorted(records) if ranks.rank == ranks.keeper else ():
            giver = ranks.keepers[writers[name]]
            try:
                _pass_on(None if folder is None else folder / name, records[name], giver, ranks)
            except DiskError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    ranks.on_each(copy)


def supply(path: Path, giver: int, wants: bool, ranks: Ranks) -> None:
    """Copy the checkpoint at `path` from the folder of rank `giver` to those that want it.

    Collective; raises DiskError everywhere.
    """
    at_work = ranks.rank == ranks.keeper
    partial = path.with_name(path.name + PARTIAL)

    @disk_errors(partial)
    def prepare() -> None:
        if wants:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    @disk_errors(partial)
    def publish() -> None:
        if wants:
            write_manifest(partial, records)
            rename_folder(partial, path)

    records = ranks.on_each(lambda: read_manifest(path) if ranks.rank == giver else {})[giver]
    ranks.on_keepers(prepare)
    here = path if ranks.rank == giver else partial if wants and at_work else None
    try:
        spread(here, records, dict.fromkeys(records, giver), ranks)
        ranks.on_keepers(publish)
    except Exception:
        if wants and at_work:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _pass_on(path: Path | None, record: FileRecord, giver: int, ranks: Ranks) -> None:
    """Send one file from the keeper `giver` to the others, to the end even after a failure."""
    import torch
    import torch.distributed as dist

    gives, digest = ranks.rank == giver, hashlib.sha256()
    file: Any = None
    failure: OSError | None = None

    def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal failure
        if failure is None and path is not None:
            try:
                return work(*arguments)
            except OSError as error:
                failure = error
        return None

    def move(values: memoryview) -> None:
        (file.readinto if gives else file.write)(values)

    if path is not None and not gives:
        attempt(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    file = attempt(open, path, "rb" if gives else "wb")
    for start in range(0, record.size, CHUNK):
        part = torch.zeros(min(CHUNK, record.size - start), dtype=torch.uint8)
        values = part.numpy().data
        if gives:
            attempt(move, values)
        dist.broadcast(part, src=giver, group=ranks.among_keepers)
        digest.update(values)
        if not gives:
            attempt(move, values)
    if file is not None:
        attempt(file.flush)
        with suppress(OSError):
            file.close()
    if path is None:
        return
    with disk_errors(path, record.size):
        if failure is not None:
            raise failure
        flush(path)
    if digest.hexdigest() != record.sha256:
        actual = f"SHA-256 {digest.hexdigest()[:12]}... of what came from rank {giver}"
        raise DiskError(Problem(str(path), actual, f"{record.sha256[:12]}..., as it was written"))
