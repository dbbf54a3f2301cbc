"""What this project's launcher and the processes that it starts leave for one another, in a folder of their machine."""

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
"""How long a process may take to end once it has said that it does."""


@dataclass(frozen=True)
class LastWords:
    """How a rank ended, for a person."""

    text: str
    code: int
    """With which it exits."""
    at: float
    """By the machine's clock."""
    follows: bool = False
    """Whether it lost its connection to another rank, which knows better."""


class Notes:
    def __init__(self, folder: Path, reader: int | None = None) -> None:
        """`reader`: the process that has to be this one's parent for its end to be read."""
        self._folder, self._reader = folder, reader

    def write_port(self, port: int) -> None:
        """On which the store of the ranks listens."""
        self._write("port", port)

    def await_port(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (port := self._read("port")) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return None if port is None else int(port)

    def write_folder(self, folder: Path) -> None:
        """Of the run."""
        self._write("folder", str(folder.absolute()))

    def folder(self) -> Path | None:
        found = self._read("folder")
        return None if found is None else Path(found)

    def write_place(self, rank: int, place: str) -> None:
        """What the rank does, "step 12, training"; of now and then."""
        self._write(f"place-{rank}", place)

    def place(self, rank: int) -> str | None:
        return self._read(f"place-{rank}") or self._read(f"left-{rank}")

    def leave(self, rank: int, place: str) -> None:
        """Say that the rank ends well: by a rename at last, which a full disk takes too."""
        self.write_place(rank, place)
        with suppress(OSError):
            (self._folder / f"place-{rank}").rename(self._folder / f"left-{rank}")

    def over(self, rank: int) -> float | None:
        """When the rank said that it ends, well or otherwise, by the machine's clock."""
        if (words := self.end(rank)) is not None:
            return words.at
        with suppress(OSError):
            return (self._folder / f"left-{rank}").stat().st_mtime
        return None

    def write_end(self, rank: int, text: str, code: int, follows: bool = False) -> bool:
        """Whether the launcher will find it: it may be gone, and no disk may have room for it."""
        if self.end(rank) is None:
            self._write(f"end-{rank}", asdict(LastWords(text, code, time.time(), follows)))
        return self._reader in (None, os.getppid()) and self.end(rank) is not None

    def end(self, rank: int) -> LastWords | None:
        found = self._read(f"end-{rank}")
        return None if found is None else LastWords(**found)

    def _write(self, name: str, value: Any) -> None:
        partial = self._folder / f".{name}.{os.getpid()}"
        with suppress(OSError):  # a launcher that is gone took its folder along, and a full disk is told elsewhere
            partial.write_text(json.dumps(value))
            partial.rename(self._folder / name)

    def _read(self, name: str) -> Any:
        with suppress(OSError, ValueError):
            return json.loads((self._folder / name).read_text())
        return None


def notes_of(environment: Mapping[str, str]) -> Notes | None:
    """None under another launcher, and without one."""
    return Notes(Path(environment[FOLDER]), os.getppid()) if FOLDER in environment else None
