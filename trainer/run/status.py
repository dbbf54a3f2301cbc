"""What can be known of a run from outside, by two files in its folder.

Its first rank writes one anew each second; the other says why the run ended, in the words of whoever was the first to
know. The store by which ranks agree on that one ends with the rank that has it; the folder outlives all of them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.distributed.stall import is_gone
from trainer.storage import parse_json

NAME, END = "status.json", "end.json"
FRESH_SECONDS = 60.0
"""How old the last sign of a run may be that is taken to live: clocks of machines differ, shared folders lag."""


def write(folder: Path, status: Mapping[str, Any]) -> None:
    """Raises OSError."""
    partial = folder / f".{NAME}.{os.getpid()}"
    partial.write_text(json.dumps({**status, "time": time.time()}))
    partial.replace(folder / NAME)


def read(folder: Path) -> dict[str, Any] | None:
    return _read(folder / NAME)


def begin(folder: Path) -> None:
    """Forget how it ended before. Raises OSError."""
    (folder / END).unlink(missing_ok=True)


def end(folder: Path, code: int, text: str) -> bool:
    """Leave with which exit code it ends, and why, for a person; whether nobody has said so before. Raises OSError."""
    try:
        with (folder / END).open("x") as file:
            json.dump({"code": code, "text": text}, file)
    except FileExistsError:
        return False
    return True


def log_of(folder: Path, rank: int) -> Path:
    """What libraries print there, and where it stood when it crashed."""
    return folder / "logs" / f"rank-{rank}.log"


def read_end(folder: Path) -> dict[str, Any] | None:
    return _read(folder / END)


def lives(status: Mapping[str, Any] | None) -> bool:
    """Whether the process that wrote it still runs: known on its machine, elsewhere by how long ago that was."""
    if status is None or status.get("ended") is not None:
        return False
    if status.get("host") == socket.gethostname():
        return not is_gone(int(status["process"]))
    return time.time() - float(status["time"]) < FRESH_SECONDS


def whose(status: Mapping[str, Any]) -> str:
    age = max(0.0, time.time() - float(status["time"]))
    return f"process {status['process']} on {status['host']}, last seen {age:.0f} s ago"


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found = parse_json(path.read_bytes())
        return found if isinstance(found, dict) else None
    return None
