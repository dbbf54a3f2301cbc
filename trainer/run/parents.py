"""The launcher above a rank: its arguments, and whether it still runs. Only Linux shows other processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "torch.distributed.run", "torch.distributed.launch")
LOOK_SECONDS = 1.0
MOST = 4
"""The most levels of a launcher's processes: script, launcher, runner, shell."""


def arguments_of(pid: int) -> list[str]:
    """Return a process's arguments. Raises OSError if it is gone or can't be seen."""
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]


def parent_of(pid: int) -> int:
    """Return a process's parent. Raises OSError as `arguments_of` does."""
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def is_launcher(arguments: list[str]) -> bool:
    """Return True if a process with these arguments starts ranks: its program, or the script or module Python runs."""
    program = Path(arguments[0]).name if arguments else ""
    if program.startswith("python"):
        program = Path(next((word for word in arguments[1:] if not word.startswith("-")), "")).name
    return program in LAUNCHERS or program.startswith("deepspeed.launcher.")


def launchers_above(pid: int) -> list[tuple[int, int]]:
    """List the launcher's processes above process `pid`, each with its child on the way down to it.

    DeepSpeed has two, of which the upper one takes signals without passing them on.
    """
    found: list[tuple[int, int]] = []
    try:
        while len(found) < MOST and is_launcher(arguments_of(parent := parent_of(pid))):
            found.append((pid, parent))
            pid = parent
    except (OSError, ValueError, IndexError):
        pass
    return found


def leave_with_launcher(own: bool) -> None:
    """Ask this process to stop once its launcher is gone, whatever ended it: nobody waits for its training.

    `own`: the parent is this project's launcher; others are recognised by their command.
    """
    above = [(os.getpid(), os.getppid())] if own else launchers_above(os.getpid())
    if above:
        threading.Thread(target=_look, args=(above,), name="launcher", daemon=True).start()


def _look(above: list[tuple[int, int]]) -> None:
    while all(_is_below(child, parent) for child, parent in above):
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_below(child: int, parent: int) -> bool:
    if child == os.getpid():
        return os.getppid() == parent
    try:
        return parent_of(child) == parent
    except (OSError, ValueError, IndexError):
        return False


def missing_hostfile(pid: int) -> str | None:
    """Return the hostfile given to the `deepspeed` command above process `pid`, if it does not exist.

    DeepSpeed itself would then train on this machine alone and exit with 0.
    """
    for _ in range(MOST):
        try:
            arguments = arguments_of(pid)
            pid = parent_of(pid)
        except (OSError, ValueError):
            return None
        named = [after for word, after in pairwise(arguments) if word in ("-H", "--hostfile")]
        named += [word.partition("=")[2] for word in arguments if word.startswith("--hostfile=")]
        if named and any("deepspeed" in argument for argument in arguments):
            return None if Path(named[0]).is_file() else named[0]
    return None
