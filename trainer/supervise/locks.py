"""The locks of runs' folders: one process at a time works on a run."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import ConfigError, Problem
from trainer.storage import disk_errors, ensure_writable
from trainer.supervise import status_files as status

LOCK = ".lock"
LOCK_SECONDS = 10.0
"""Seconds for which forks of a dead process may hold its lock."""
_HANDLES: list[int] = []
"""The descriptors of this process's locks."""


def hold(folder: Path) -> bool:
    """Lock a folder until `release`; return False if another process has it. Raises DiskError."""
    ensure_writable(folder)
    handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        locked = False
    except OSError:  # no locks on this file system
        locked = not status.lives(status.read(folder))
    if locked:
        _HANDLES.append(handle)
    else:
        os.close(handle)
    return locked


def release() -> None:
    """Unlock all folders of this process."""
    while _HANDLES:
        with suppress(OSError):  # no locks on this file system; a fork may have the descriptor, too
            fcntl.flock(_HANDLES[-1], fcntl.LOCK_UN)
        os.close(_HANDLES.pop())


@contextmanager
def one_at_a_time(folder: Path, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Lock a folder of runs inside the context; call `waits` while another process has it.

    Raises DiskError if the folder can't be made.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waits()
                time.sleep(0.2)
            except OSError:  # no locks on this file system
                break
        yield
    finally:
        os.close(handle)


def take_over(folder: Path) -> None:
    """Lock a run's folder. Raises ConfigError if another process uses it, DiskError as `hold`."""
    deadline = time.monotonic() + LOCK_SECONDS
    while not hold(folder):
        other = status.read(folder)
        if status.lives(other) or time.monotonic() > deadline:
            by = f"being trained by {status.whose(other)}" if other else "locked by another process"
            hint = (
                "Wait for it, stop it, give this run another trainer.run.name, or start one "
                "beside it with --fresh"
            )
            raise ConfigError(Problem(f"trainer.run: {folder}", by, hint=hint))
        time.sleep(0.5)
