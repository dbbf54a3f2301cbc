"""The status of a run for outside readers, in two files in its folder.

The first rank rewrites `status.json` each second. `end.json` says why the run ended; the first
process to know writes it, and no other. It outlives the ranks' store, by which they agree as well.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.storage import Json, json_in, publish_json
from trainer.supervise.stall import is_gone

NAME = "status.json"
END = "end.json"
_NUMBER = (int, float)
_MOST = 10**12
_Kinds = Mapping[str, tuple[type, ...]]
_WRITER: _Kinds = {"host": (str,), "process": (int,), "time": _NUMBER, "ended": (int, type(None))}
_SHOWN: _Kinds = {
    **{"place": (str,), "step": (int,), "steps": (int, type(None)), "ranks": (int,)},
    **{"still": _NUMBER, "limit": _NUMBER, "waits_for": (list,)},
}
_WAITED_FOR: _Kinds = {"rank": (int,), "host": (str,), "place": (str,), "still": _NUMBER}
_LAST_WORDS: _Kinds = {"code": (int,), "text": (str,)}
"""The types of fields read from the files, and of each rank that is waited for."""
FRESH_SECONDS = 60.0
"""Seconds since the last sign of a live run: machines' clocks differ, shared folders lag."""


def write(folder: Path, status: Mapping[str, object]) -> None:
    """Write the status. Raises OSError."""
    publish_json(folder / NAME, {**status, "time": time.time()})


def read(folder: Path) -> Json | None:
    """Return the first rank's last status; None without one, or if it lacks a writer or a time."""
    return _read(folder / NAME, _WRITER)


def can_be_shown(status: Json) -> bool:
    return _is(status, _SHOWN) and all(_is(one, _WAITED_FOR) for one in status["waits_for"])


def begin(folder: Path) -> None:
    """Forget the run's earlier end. Raises OSError."""
    (folder / END).unlink(missing_ok=True)


def end(folder: Path, code: int, text: str) -> bool:
    """Record the exit code and the reason; return False if another rank has. Raises OSError."""
    try:
        with (folder / END).open("x") as file:
            json.dump({"code": code, "text": text}, file)
    except FileExistsError:
        return False
    return True


def log_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log: output of libraries, and the stack of a crash."""
    return folder / "logs" / f"rank-{rank}.log"


def read_end(folder: Path) -> Json | None:
    return _read(folder / END, _LAST_WORDS)


def lives(status: Json | None) -> bool:
    """Return True if the writer still runs; elsewhere, if its last sign of life is fresh."""
    if status is None or status.get("ended") is not None:
        return False
    if status.get("host") == socket.gethostname():
        return not is_gone(int(status["process"]))
    return time.time() - float(status["time"]) < FRESH_SECONDS


def whose(status: Json) -> str:
    age = max(0.0, time.time() - float(status["time"]))
    return f"process {status['process']} on {status['host']}, last seen {age:.0f} s ago"


def _read(path: Path, kinds: _Kinds) -> Json | None:
    content = json_in(path)
    return content if _is(content, kinds) else None


def _is(content: Any, kinds: _Kinds) -> bool:
    """Return True if a parsed value has these fields, of these types, with plausible numbers."""
    fits = (_fits(content.get(name), types) for name, types in kinds.items())
    return isinstance(content, dict) and all(fits)


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    return type(value) in types and (type(value) not in _NUMBER or abs(value) < _MOST)
