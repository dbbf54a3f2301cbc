"""Folders that are written once, appear whole or not at all, and are only read afterwards.

At each use, a folder is compared with the sizes, times and some of the hashes that were written
with it, and a damaged one is prepared again; the other hashes are compared beside the first steps.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trainer.data.progress import QUIET, Progress
from trainer.data.sealed import flaw, seal, stamp
from trainer.errors import DataError, DiskError, MeshloomError, Problem
from trainer.storage import private_folder, rename_folder

Write = Callable[[Path], object]
EXPLAINED_SECONDS = 60.0
"""Seconds that an unexpected error waits for the comparison, which may explain it."""
_POLL_SECONDS = 1.0
_OLD_SECONDS = 7 * 86_400
"""The age in seconds at which an unfinished folder is taken to be abandoned."""


def cached_folder(cache: Path, name: str, write: Write, progress: Progress = QUIET) -> Path:
    """Return the folder `cache / name`; a missing one is filled by `write(folder)`, then renamed.

    One process writes; the others wait (`progress` says so), and one begins again if the writer
    dies. Where this user can't write, the folder is in a cache of the user's own, with a note.
    Raises DiskError if neither place can be used; errors of `write` are not caught.
    """
    return _somewhere(cache, lambda place: _one_at_a_time(place, name, write, progress), progress)


def _one_at_a_time(cache: Path, name: str, write: Write, progress: Progress) -> Path:
    if _is_whole(cache / name, progress):
        return cache / name
    begun = cache / f".partial-{name}"
    begun.mkdir(parents=True, exist_ok=True)
    lock = FileLock(begun / "lock")
    try:
        with suppress(Timeout):
            lock.acquire(blocking=False)
        if not lock.is_locked:
            progress.waits()
            _acquire(lock, begun / "progress", progress)
    except OSError:  # no locks on this file system, or another process has just ended
        with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as own:
            _write(Path(own), cache / name, write, progress)
        return cache / name
    try:
        with progress.marking(begun / "progress"):
            _write(begun, cache / name, write, progress)
    finally:
        discard(begun)  # while it is locked: the next process makes another
        lock.release()
    return cache / name


def _acquire(lock: FileLock, mark: Path, progress: Progress) -> None:
    """Wait for a lock; its owner shows progress in the time of a file, which is progress here."""
    last = 0
    while not lock.is_locked:
        with suppress(FileNotFoundError):  # before the first, and after the end
            if (touched := mark.stat().st_mtime_ns) != last:
                last = touched
                progress.moves()
        with suppress(Timeout):
            lock.acquire(timeout=_POLL_SECONDS, poll_interval=_POLL_SECONDS / 4)


def _write(begun: Path, final: Path, write: Write, progress: Progress) -> None:
    """Write the folder below `begun`, unless another process has written it meanwhile."""
    if _is_whole(final, progress):
        return
    if os.path.lexists(final):
        discard(final)
    folder = begun / "data"
    _delete(folder)
    folder.mkdir()
    write(folder)
    seal(folder, progress.checks)
    try:
        rename_folder(folder, final)
    except OSError:
        if not final.is_dir():  # else another process was faster, with the same content
            raise
    _sweep(final.parent)


# Existing folders


def _is_whole(final: Path, progress: Progress) -> bool:
    if not os.path.lexists(final):
        return False
    if damage := flaw(final, progress.checks) or _damaged_before(final):
        progress.note(f"cache: {final} is damaged: {damage}; it is prepared again")
    return not damage


def _damaged(folder: Path) -> Path:
    """Return the path of this user's note that a folder, which can't be removed, is damaged."""
    return private_folder() / f"damaged-{folder.name}"


def _damaged_before(folder: Path) -> str:
    with suppress(OSError):
        if _damaged(folder).read_text() == str(stamp(folder)):
            return "an earlier run has found other bytes than were written"
    return ""


def discard(path: Path) -> None:
    """Remove a path, under another name first, so that its own name is free at once."""
    gone = path.with_name(f".gone-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(gone)
    _delete(gone)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sweep(cache: Path) -> None:
    """Remove what killed processes have left."""
    with suppress(OSError):
        old = time.time() - _OLD_SECONDS
        partial = [path for path in cache.glob(".partial-*") if path.stat().st_mtime < old]
        for path in (*cache.glob(".gone-*"), *partial):
            _delete(path)


class Check:
    """Compares the rest of prepared folders with their hashes, in a thread of low priority.

    A damaged folder is taken away, so that the next start makes it again. An unexpected error in
    the context waits for the end, up to EXPLAINED_SECONDS: damaged data may be its cause.
    """

    def __init__(self, folders: Sequence[Path] = (), begins: bool = False) -> None:
        """Note the opened folders; it starts with the context if `begins`, else after an error."""
        self._opened = [(folder, stamp(folder)) for folder in folders]
        self._begins = begins
        self._problems: list[Problem] = []
        self._thread = threading.Thread(target=self._compare, name="prepared data", daemon=True)

    def __enter__(self) -> Check:
        if self._begins:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, MeshloomError) or not self._opened:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(EXPLAINED_SECONDS)
        if self._problems:
            raise DataError(*self._problems) from error

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return bool(self._problems)

    def refuse(self) -> None:
        """Raise DataError for the damaged folders that were found."""
        if self._problems:
            raise DataError(*self._problems)

    def _compare(self) -> None:
        if sys.platform == "linux":  # there, a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for folder, opened in self._opened:
            try:
                actual = flaw(folder, rest=True)
            except Exception as error:  # a thread that has ended has compared nothing
                actual = f"it could not be compared: {error!r}"
            if stamp(folder) != opened:
                self._report(folder, "another process has replaced it")
            elif actual:
                self._report(folder, actual)
                _take_away(folder, opened)

    def _report(self, folder: Path, difference: str) -> None:
        hint = "Remove it if it is still there; the same command then prepares it again"
        problem = Problem(str(folder), f"damaged: {difference}", "what was written", hint)
        self._problems.append(problem)


def _take_away(folder: Path, opened: tuple[int, int] | None) -> None:
    """Remove a damaged folder; if that is not allowed, note for this user that it is damaged."""
    try:
        discard(folder)
    except OSError:
        with suppress(OSError):
            _damaged(folder).write_text(str(opened))


NOTHING = Check()

# The place of the cache


def _somewhere(cache: Path, work: Callable[[Path], Path], progress: Progress) -> Path:
    """Run `work` in `cache` or, if this user can't write there, in a folder of the user's own."""
    with _disk(cache):
        try:
            return work(cache)
        except OSError as error:
            writable = os.path.isdir(cache) and os.access(cache, os.W_OK)
            if writable and not isinstance(error, PermissionError):
                raise  # the disk is full, or fails
            private = private_folder()
            actual = f"cache: {cache} can't be used ({error.strerror})"
    where = f"prepared data goes to {private}; XDG_CACHE_HOME names another place"
    progress.note(f"{actual}: {where}")
    with _disk(private):
        return work(private)


@contextmanager
def _disk(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        actual = f"{error.strerror or error}"
        expected = "a cache folder that can be written"
        hint = "Free space there, change its permissions, or set XDG_CACHE_HOME to another folder"
        raise DiskError(Problem(str(cache), actual, expected, hint)) from error
