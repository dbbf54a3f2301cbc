"""Run folders that are local to each machine: files of one are copied to the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.file_records import (
    PARTS,
    Hashed,
    Records,
    digest_of,
    kind_of,
    new_hash,
    shown,
)
from trainer.checkpoint.manifest import read_manifest, write_manifest
from trainer.checkpoint.parts_file import with_parts
from trainer.checkpoint.safetensors_stream import put
from trainer.errors import DiskError, Problem
from trainer.storage import disk_errors, flush, rename_folder

if TYPE_CHECKING:
    from trainer.distributed.ranks import Ranks

PARTIAL = ".partial"
"""The end of the name of an unfinished folder."""
CHUNK = 16 * 2**20
"""The bytes that are sent over the network at a time, and at most twice as many."""


def spread(
    folder: Path, records: Records, writers: Mapping[str, Sequence[int]], ranks: Ranks
) -> None:
    """Copy each part of the files of `records` from the folder of its writer to all others.

    Collective. `writers` are the ranks that wrote a file's parts, in the order of its record, and
    of `PARTS` those that wrote its lines and the parts in them. `folder` is the one that this rank
    sees. Copies are flushed, and their hashes are compared with the records. Raises DiskError on
    every rank, after all parts were sent, and ConfigError if a machine lacks the package of a hash.
    """
    _copy_all(folder, folder, records, writers, ranks)


def supply(path: Path, giver: int, wants: bool, ranks: Ranks) -> None:
    """Copy the checkpoint at `path` from the folder of rank `giver` to those that lack it.

    Collective. `wants`: True if the folder that this rank sees gets the copy. Raises on every rank
    DiskError, and ConfigError if a machine lacks the package of a hash.
    """
    at_work = ranks.rank == ranks.node_first
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
    _have_hashes(records, ranks)
    ranks.on_node_firsts(prepare)
    here: Path | None = None
    if ranks.rank == giver:
        here = path
    elif wants and at_work:
        here = partial
    with removed_on_error(partial, wants and at_work):
        writers = {name: [giver] * len(record.parts) for name, record in records.items()}
        _copy_all(here, here or path, records, writers, ranks)
        ranks.on_node_firsts(publish)


def _copy_all(
    here: Path | None,
    source: Path,
    records: Records,
    writers: Mapping[str, Sequence[int]],
    ranks: Ranks,
) -> None:
    """Copy as `spread` does to the folder `here`, None for no copy; read `PARTS` in `source`."""
    if len(set(ranks.node_firsts)) < 2:
        return
    if PARTS in records:  # first, since it says what is in the others
        _copy(here, {PARTS: records[PARTS]}, writers, ranks)
        at_work = ranks.rank == ranks.node_first

        @disk_errors(source / PARTS)
        def listed() -> tuple[Records, Mapping[str, Sequence[int]]]:
            return with_parts(source, records, writers) if at_work else ({}, {})

        records, writers = ranks.on_own(listed)
        _have_hashes(records, ranks)
    _copy(here, records, writers, ranks)


def _have_hashes(records: Records, ranks: Ranks) -> None:
    """Raise ConfigError on every rank if a machine lacks the package of a hash. Collective."""
    kinds = {kind_of(digest) for record in records.values() for _, digest in record.parts}
    ranks.on_own(lambda: [new_hash(kind) for kind in kinds])


def _copy(
    here: Path | None, records: Records, writers: Mapping[str, Sequence[int]], ranks: Ranks
) -> None:
    def copy() -> None:
        failures = []
        for name in sorted(records) if ranks.rank == ranks.node_first else ():
            path = None if here is None else here / name
            for part, rank in zip(records[name].parts, writers[name], strict=True):
                try:
                    _pass_on(path, part, ranks.node_firsts[rank], ranks)
                except DiskError as error:
                    failures.append(error)
            if path is not None and not failures:
                with disk_errors(path):
                    flush(path)
        if failures:
            raise failures[0]

    ranks.on_each(copy)


@contextmanager
def removed_on_error(partial: Path, removes: bool) -> Iterator[None]:
    """Remove the folder `partial` after an error; `removes`: True on the rank that does it."""
    try:
        yield
    except Exception:
        if removes:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _pass_on(path: Path | None, part: Hashed, giver: int, ranks: Ranks) -> None:
    """Send a part of a file from rank `giver` to others. A rank takes part even after an error."""
    import torch
    import torch.distributed as dist

    (place, wanted), gives, came = part, ranks.rank == giver, new_hash(kind_of(part[1]))
    file = -1
    failure = None

    def attempt(work: Callable[..., object], *arguments: Any) -> Any:
        nonlocal failure
        if failure is None and path is not None:
            try:
                return work(*arguments)
            except OSError as error:
                failure = error
        return None

    def begin(path: Path) -> int:
        if gives:
            return os.open(path, os.O_RDONLY)
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)

    def move(values: memoryview, pieces: Sequence[tuple[int, int]]) -> None:
        for start, end in pieces:
            own = values[: end - start]
            values = values[end - start :]
            os.preadv(file, [own], start) if gives else put(file, own, start)

    file = attempt(begin, path)
    for pieces in _batches(place.runs(CHUNK)):
        sent = torch.zeros(sum(end - start for start, end in pieces), dtype=torch.uint8)
        values = sent.numpy().data
        if gives:
            attempt(move, values, pieces)
        dist.broadcast(sent, src=giver, group=ranks.among_node_firsts)
        came.update(values)
        if not gives:
            attempt(move, values, pieces)
    if file is not None:
        attempt(os.close, file)
    if path is None:
        return
    with disk_errors(path, place.size):
        if failure is not None:
            raise failure
    if (digest := digest_of(came)) != wanted:
        actual = f"{shown(digest)} of what came from rank {giver}"
        raise DiskError(Problem(str(path), actual, f"{shown(wanted)}, as it was written"))


def _batches(pieces: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield pieces of a file in groups of about `CHUNK` bytes."""
    batch = []
    size = 0
    for start, end in pieces:
        batch.append((start, end))
        if (size := size + end - start) >= CHUNK:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
