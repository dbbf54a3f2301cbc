"""The files at an address of fsspec, such as a bucket: nothing waits longer than bytes move."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from trainer.checkpoint import faults
from trainer.errors import DiskError, Problem

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

SILENT_SECONDS = 60.0
"""Seconds without an answer after which a server is given up."""
SLOW_NETWORK = 1e5
"""The lowest speed, in bytes/s, of a network that is not given up while it moves a block."""
BLOCK = 8 * 2**20
MOST_BLOCKS = 9_000
"""Bytes that are moved at a time, and the most parts of a file: S3 allows 10,000."""

STREAMS = 4
"""Files that are copied at the same time."""


def block_of(size: int) -> int:
    """Return the bytes of a file of `size` that are moved at a time."""
    return max(BLOCK, size // MOST_BLOCKS + 1)


def patience(block: int = 0) -> float:
    """Return the seconds without an answer after which a server is given up, or a block of it."""
    return SILENT_SECONDS + block / SLOW_NETWORK


class Bucket:
    """The files below an address; all paths are relative to it.

    Each method raises the file system's errors, and DiskError if that gives no answer for
    SILENT_SECONDS, plus the time that SLOW_NETWORK takes for a block while a file is moved.
    """

    def __init__(self, address: str, moved: Callable[[int], object] = lambda count: None) -> None:
        """Call `moved` with the bytes of each block that was moved, 0 for another answer."""
        self.address = address.rstrip("/")
        self._moved = moved
        self._opened: tuple[AbstractFileSystem, str] | None = None

    def names(self, path: str = "") -> list[str]:
        """List the names in a folder; none if there is no such folder."""

        def listed(files: AbstractFileSystem, root: str, call: _Call) -> list[str]:
            with suppress(FileNotFoundError, NotADirectoryError):
                folder = PurePosixPath(_join(root, path))
                paths = map(PurePosixPath, files.ls(str(folder), detail=False))
                return [one.name for one in paths if one != folder]
            return []

        return self._bounded(listed)

    def read(self, path: str) -> bytes:
        """Return the content of a file that is not large."""
        return self._bounded(lambda files, root, call: bytes(files.cat_file(_join(root, path))))

    def write(self, path: str, content: bytes) -> None:
        """Replace a small file: at once where it is local, elsewhere as the file system does it."""

        def written(files: AbstractFileSystem, root: str, call: _Call) -> None:
            to = _join(root, path)
            files.makedirs(to.rpartition("/")[0], exist_ok=True)
            if isinstance(files, LocalFileSystem):  # others replace it when the last byte is there
                files.pipe_file(f"{to}.new", content)
                os.replace(f"{to}.new", to)
            else:
                files.pipe_file(to, content)

        self._bounded(written, len(content))

    def probe(self, path: str) -> None:
        """Write and remove a file, to see if that can be done."""

        def tried(files: AbstractFileSystem, root: str, call: _Call) -> None:
            files.makedirs(root, exist_ok=True)
            files.pipe_file(_join(root, path), b"")
            call.moved(0)
            with suppress(FileNotFoundError):  # another run was as quick
                files.rm_file(_join(root, path))

        self._bounded(tried)

    def put(self, source: Path, path: str) -> None:
        """Copy a local file to a path."""
        block = block_of(source.stat().st_size)

        def moved(files: AbstractFileSystem, root: str, call: _Call) -> None:
            to = _join(root, path)
            files.makedirs(to.rpartition("/")[0], exist_ok=True)
            with source.open("rb") as given, _written(files, to, block) as file:
                while part := given.read(block):
                    file.write(part)
                    call.moved(len(part))

        self._bounded(moved, block)

    def get(self, path: str, target: Path) -> None:
        """Copy a file to a local one, whose folder is there."""

        def moved(files: AbstractFileSystem, root: str, call: _Call) -> None:
            opened = files.open(_join(root, path), "rb", block_size=BLOCK, cache_type="none")
            with opened as file, target.open("wb") as own:
                while part := file.read(BLOCK):
                    own.write(part)
                    call.moved(len(part))

        self._bounded(moved, BLOCK)

    def remove_file(self, path: str) -> None:
        """Remove a file, if it is there."""

        def removed(files: AbstractFileSystem, root: str, call: _Call) -> None:
            with suppress(FileNotFoundError):
                files.rm_file(_join(root, path))

        self._bounded(removed)

    def remove(self, path: str, first: str) -> None:
        """Remove a folder with all in it, the file `first` before all others."""

        def removed(files: AbstractFileSystem, root: str, call: _Call) -> None:
            folder = _join(root, path)
            with suppress(FileNotFoundError):
                files.rm_file(f"{folder}/{first}")
            for name in files.find(folder):
                call.moved(0)
                files.rm_file(name)
            with suppress(FileNotFoundError):  # the folders themselves, where there are such
                files.rm(folder, recursive=True)

        self._bounded(removed)

    def _bounded(self, work: _Work[T], block: int = 0) -> T:
        """Run one operation, which may block forever, in a thread of its own."""
        limit = patience(block)
        call = _Call(self._open, work, self._moved)
        Thread(target=call.run, name="bucket", daemon=True).start()
        while not call.done.wait(0.5):
            if time.monotonic() - call.last > limit:
                call.given_up.set()
                actual = f"no answer for {limit:.0f} s"
                hint = "Check the address and the network; the same command tries again"
                raise DiskError(Problem(self.address, actual, "a server that answers", hint))
        call.moved(0)
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[no-any-return]

    def _open(self) -> tuple[AbstractFileSystem, str]:
        """Return the file system, one for all threads, and the path of the address there."""
        if self._opened is None:
            files, root = fsspec.core.url_to_fs(self.address)
            self._opened = files, root.rstrip("/")
        self._opened[0].invalidate_cache()
        return self._opened


class _Call:
    """One operation, with the time of its last sign of progress."""

    def __init__(
        self,
        opened: Callable[[], tuple[AbstractFileSystem, str]],
        work: _Work[object],
        report: Callable[[int], object],
    ) -> None:
        self._opened = opened
        self._work = work
        self._report = report
        self.done = Event()
        self.given_up = Event()
        self.last = time.monotonic()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            faults.at("bucket")
            self.result = self._work(*self._opened(), self)
        except BaseException as error:
            self.error = error
        self.done.set()

    def moved(self, count: int) -> None:
        """Note an answer; raise TimeoutError in a thread for which nobody waits any more."""
        if self.given_up.is_set():
            raise TimeoutError("given up")
        self.last = time.monotonic()
        self._report(count)
        if count:
            faults.at("block")


_Work = Callable[["AbstractFileSystem", str, _Call], T]
"""Does something with a file system, below a path of it; tells the call of each block."""


@contextmanager
def _written(files: AbstractFileSystem, path: str, block: int) -> Iterator[Any]:
    """Open a file to write it in blocks; of one that fails, leave no part where that can be."""
    file = files.open(path, "wb", block_size=block)
    try:
        yield file
    except BaseException:
        for end in (getattr(file, "discard", file.close), file.close):
            with suppress(Exception):
                end()
        raise
    file.close()


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if path else root


def in_streams(work: Callable[[str], object], names: Iterable[str]) -> None:
    """Call `work` for each name, for STREAMS at a time, in threads that keep no process alive.

    No call begins after an error. Raises the first error once the calls in progress have ended.
    """
    left = deque(names)
    errors = list[BaseException]()

    def run() -> None:
        while left and not errors:
            with suppress(IndexError):  # another thread was as quick
                name = left.popleft()
                try:
                    work(name)
                except BaseException as error:
                    errors.append(error)

    threads = [Thread(target=run, name="stream", daemon=True) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
