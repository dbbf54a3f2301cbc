"""The locks of runs' folders: one process at a time works on a run."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from trainer.errors import ConfigError, Problem
from trainer.storage import ensure_writable
from trainer.supervise import status_files as status

LOCK = ".lock"
HELD_SECONDS = 10.0
"""Seconds for which forks of a dead process may hold its lock."""
_HELD: list[int] = []
"""The descriptors of this process's locks."""


def hold(folder: Path) -> bool:
    """Lock a folder until `release`; return False if another process has it. Raises DiskError."""
    ensure_writable(folder)
    handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    except OSError:  # no locks on this file system
        held = not status.lives(status.read(folder))
    if held:
        _HELD.append(handle)
    else:
        os.close(handle)
    return held


def release() -> None:
    """Unlock all folders of this process."""
    while _HELD:
        with suppress(OSError):  # no locks on this file system; a fork may have the descriptor, too
            fcntl.flock(_HELD[-1], fcntl.LOCK_UN)
        os.close(_HELD.pop())


def take_over(folder: Path) -> None:
    """Lock a run's folder. Raises ConfigError if another process uses it."""
    deadline = time.monotonic() + HELD_SECONDS
    while not hold(folder):
        found = status.read(folder)
        if status.lives(found) or time.monotonic() > deadline:
            by = f"being trained by {status.whose(found)}" if found else "held by another process"
            hint = (
                "Wait for it, stop it, give this run another trainer.run.name, or start one "
                "beside it with --fresh"
            )
            expected = "a run that nobody is at work on"
            raise ConfigError(Problem(f"trainer.run: {folder}", by, expected, hint))
        time.sleep(0.5)
