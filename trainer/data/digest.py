"""Digests of files: the same content has the same digest, whatever its name and time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trainer.data.sealed import checked
from trainer.errors import DataError, Problem
from trainer.storage import replace_file

_QUICK = 1 << 26
"""The bytes below which a file is read each time, which takes hundredths of a second."""
_RACY_SECONDS = 5
"""The age in seconds below which a file may still change without a new size or time."""


def digests(
    files: Sequence[Path], cache: Path, progress: Callable[[int], object] = lambda _: None
) -> list[str]:
    """Return the SHA-256 of each file; that of a large, unchanged file is taken from the cache.

    `progress` is called with the number of files done. Raises DataError for an unreadable file.
    """
    with ThreadPoolExecutor(8) as pool:  # disks and hashing can do several at once
        digests = []
        for digest in pool.map(lambda file: _digest(file, cache), files):
            digests.append(digest)
            progress(len(digests))
        return digests


def stamps(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return name, size and time of files, which show most changes without reading them."""
    return [_stamp(file) for file in files]


def _stamp(file: Path) -> tuple[str, int, int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise _unread(file, error) from error
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns


def _digest(file: Path, cache: Path) -> str:
    stamp = _stamp(file)
    remembered = cache / f"digest-{hashlib.sha256(repr(stamp).encode()).hexdigest()[:32]}"
    with suppress(OSError, ValueError):
        known, check = remembered.read_text(encoding="ascii").split()
        if check == checked(f"{stamp} {known}"):
            return known
    try:
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise _unread(file, error) from error
    settled = time.time() - stamp[2] / 1e9 > _RACY_SECONDS
    if stamp[1] >= _QUICK and settled and stamp == _stamp(file):
        with suppress(OSError):  # a digest that can't be stored is computed again
            cache.mkdir(parents=True, exist_ok=True)
            replace_file(remembered, f"{digest} {checked(f'{stamp} {digest}')}".encode())
    return digest


def _unread(file: Path, error: OSError) -> DataError:
    return DataError(Problem(str(file), error.strerror or str(error), "a file that can be read"))
