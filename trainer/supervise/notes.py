"""Notes that this project's launcher and its processes leave for one another, in a folder of their
machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "MESHLOOM_LAUNCHER"
"""The environment variable that names the folder."""
LEAVE_SECONDS = 60.0
"""Seconds that a process may take to end after it has announced that."""


@dataclass(frozen=True)
class LastWords:
    """The report of a rank on its end, for the user."""

    text: str
    code: int
    """The exit code."""
    at: float
    """The time of the report, by the machine's clock."""
    follows: bool = False
    """True if it lost its connection to another rank, whose report is better."""


class Notes:
    def __init__(self, folder: Path, reader: int | None = None) -> None:
        """Use `folder`; `reader` is the process that must still be the parent, else nobody reads
        this one's end.
        """
        self._folder, self._reader = folder, reader

    def write_port(self, port: int) -> None:
        """Write the port on which the ranks' store listens."""
        self._write("port", port)

    def await_port(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (port := self._read("port")) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return None if port is None else int(port)

    def write_folder(self, folder: Path) -> None:
        """Write the run's folder."""
        self._write("folder", str(folder.absolute()))

    def folder(self) -> Path | None:
        found = self._read("folder")
        return None if found is None else Path(found)

    def write_place(self, rank: int, place: str) -> None:
        """Write what the rank is doing, such as "step 12, training"; called now and then."""
        self._write(f"place-{rank}", place)

    def place(self, rank: int) -> str | None:
        return self._read(f"place-{rank}") or self._read(f"left-{rank}")

    def leave(self, rank: int, place: str) -> None:
        """Announce a good end: by a rename at last, which works on a full disk, too."""
        self.write_place(rank, place)
        with suppress(OSError):
            (self._folder / f"place-{rank}").rename(self._folder / f"left-{rank}")

    def over(self, rank: int) -> float | None:
        """Return the time at which the rank announced its end, good or bad, by the machine's
        clock.
        """
        if (words := self.end(rank)) is not None:
            return words.at
        with suppress(OSError):
            return (self._folder / f"left-{rank}").stat().st_mtime
        return None

    def write_end(self, rank: int, text: str, code: int, follows: bool = False) -> bool:
        """Write the end; return True if the launcher will find it: it may be gone, or the disk may
        be full.
        """
        if self.end(rank) is None:
            self._write(f"end-{rank}", asdict(LastWords(text, code, time.time(), follows)))
        return self._reader in (None, os.getppid()) and self.end(rank) is not None

    def end(self, rank: int) -> LastWords | None:
        found = self._read(f"end-{rank}")
        return None if found is None else LastWords(**found)

    def _write(self, name: str, value: Any) -> None:
        partial = self._folder / f".{name}.{os.getpid()}"
        with suppress(
            OSError
        ):  # a launcher that is gone took its folder along; a full disk is reported elsewhere
            partial.write_text(json.dumps(value))
            partial.rename(self._folder / name)

    def _read(self, name: str) -> Any:
        with suppress(OSError, ValueError):
            return json.loads((self._folder / name).read_text())
        return None


def notes_of(environment: Mapping[str, str]) -> Notes | None:
    """Return the notes of this project's launcher; None under another launcher, or without one."""
    return Notes(Path(environment[FOLDER]), os.getppid()) if FOLDER in environment else None
