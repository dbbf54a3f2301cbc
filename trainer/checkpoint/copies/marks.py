"""The mark of a copy, which names its writer, with a sign of life every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from trainer.checkpoint.copies.bucket import Bucket
from trainer.checkpoint.directory import step_of
from trainer.checkpoint.manifest import MANIFEST, STEP_FOLDER
from trainer.errors import DiskError, Problem, refused
from trainer.storage import Json, parse_json

KEY = "trainer.checkpoint.upload"
MARK = "upload.json"
"""The file at a copy, with who writes it and the token of the folder that the copy is of.

The run's folder has one with its own token, that of the copy it was made from, and the names of
the checkpoints that were damaged there."""
SIGN_SECONDS = 10.0
PATIENCE_SECONDS = 45.0
"""Seconds between signs of life, and seconds without one after which a writer counts as dead."""
READS = 3
"""The attempts to read a mark: one that is cut off may still be being written."""


def marked_at(bucket: Bucket) -> list[str]:
    """List the checkpoints at a run's copy that have a manifest, oldest first."""
    steps = filter(STEP_FOLDER.fullmatch, bucket.names("checkpoints"))
    whole = [name for name in steps if MANIFEST in bucket.names(f"checkpoints/{name}")]
    return sorted(whole, key=order)


def mark_at(address: str) -> Json:
    """Return the mark of a copy, or of a run's folder; {} for none, or for no mark of ours."""
    return mark_of(Bucket(address))


def mark_of(bucket: Bucket) -> Json:
    for attempt in range(READS):
        time.sleep(attempt / 2)
        try:
            content = bucket.read(MARK)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        with suppress(ValueError, TypeError):  # a write that goes on, or was cut off by a death
            mark = dict(parse_json(content))
            return mark if isinstance(mark.get("token"), str) else {}
    return {}


def left_mark(address: str, waits: Callable[[], object]) -> Json:
    """Return a copy's mark if its run has ended, or there is no sign of life; {} for none.

    No clocks of two machines are compared. `waits` is called meanwhile. Raises DiskError at a sign
    of life.
    """
    bucket = Bucket(address)
    first = mark_of(bucket)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not first.get("ended", not first) and time.monotonic() < deadline:
        time.sleep(SIGN_SECONDS / 10)
        waits()
        if (mark := mark_of(bucket)) != first:
            raise foreign(address, mark)
    return first


def foreign(address: str, mark: Json) -> DiskError:
    own = "Set another trainer.run.name, or stop the other run"
    hint = f"{own}; with its folder here moved away, the same command resumes from that copy"
    expected = "a copy of this folder alone, to which nothing is written now"
    return DiskError(Problem(f"{KEY}: {address}", last_writer(mark), expected, hint))


def last_writer(mark: Json) -> str:
    return f"written by {mark.get('by', 'nobody')}, last seen {time.ctime(mark.get('time', 0))}"


def copying(address: str, hint: str) -> AbstractContextManager[None]:
    place = f"{KEY}: {address}"
    expected = "a copy that is complete"
    return refused(place, expected, named=True, hint=hint, raises=DiskError)


def order(name: str) -> int:
    return step_of(Path(name))
