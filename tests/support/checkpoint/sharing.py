"""Ranks that copy a run's folder together: threads of one process, and the store that they use."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.support.checkpoint.uploading import checkpoints
from trainer.checkpoint.copies import share_store, shares
from trainer.checkpoint.copies.bucket import Bucket
from trainer.checkpoint.copies.upload import Upload
from trainer.checkpoint.directory import step_name
from trainer.checkpoint.manifest import MANIFEST, write_manifest

LARGE = 10_000
"""The bytes from which a file is shared, in these tests."""


def with_files(folder: Path, step: int, sizes: Sequence[int]) -> Path:
    """Save a checkpoint that has files of these sizes, too; return the run's folder."""
    path = checkpoints(folder, step) / "checkpoints" / step_name(step)
    (path / MANIFEST).unlink()
    for number, size in enumerate(sizes):
        (path / f"model/part-{number:02d}.data").write_bytes(bytes([number]) * size)
    write_manifest(path, {})
    for name in ("config.json", "environment.json"):
        (folder / name).write_text("{}")
    return folder


@contextmanager
def quick() -> Iterator[None]:
    """Looks every 0.02 s, and files of LARGE bytes that are shared."""
    with (
        patch.multiple(share_store, POLL_SECONDS=0.02, TICK_SECONDS=0.02),
        patch.object(shares, "SMALL", LARGE),
    ):
        yield


@contextmanager
def ranks_at(address: str, folders: Sequence[Path], missing: int = 0) -> Iterator[list[Upload]]:
    """Yield the upload of each rank, which sees the run in its folder; the first has the claim.

    The others have come, to copy or with a problem; so many more are `missing`.
    """
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    uploads = [Upload(address, folder) for folder in folders]
    uploads[0].claim({"token": "own"})
    with quick():
        for rank, upload in enumerate(uploads):
            upload.share(rank, len(uploads) + missing, store)
        first = uploads[0]._shares
        assert first is not None
        while len(first._arrivals()) < len(uploads) - 1:
            time.sleep(0.01)
        try:
            yield uploads
        finally:
            uploads[0].stop_sharing()  # before the others, or it would wait for their reports
            for upload in uploads[1:]:
                upload.stop_sharing()
            uploads[0].close()


@contextmanager
def copied_by(folders: Sequence[Path]) -> Iterator[dict[int, dict[str, int]]]:
    """Yield, for each rank, the sizes of the files that it copies, by name."""
    put = Bucket.put
    copied: dict[int, dict[str, int]] = defaultdict(dict)

    def noted(own: Bucket, source: Path, path: str) -> None:
        put(own, source, path)
        [rank] = [n for n, folder in enumerate(folders) if source.is_relative_to(folder)]
        copied[rank][source.name] = source.stat().st_size

    with patch.object(Bucket, "put", noted):
        yield copied
