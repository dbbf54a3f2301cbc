"""Notes that this project's launcher and its ranks leave for one another, in a temporary folder."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.storage import json_in, private_folder, publish_json
from trainer.supervise.stall import is_gone

FOLDER = "MESHLOOM_LAUNCHER"
"""The environment variable that names the folder."""
PLACE_BYTES = 80
"""The size of the note on what a rank is doing, filled up so that it replaces a longer one."""
LEAVE_SECONDS = 60.0
"""Seconds that a process may take to end after it has announced that."""


@dataclass(frozen=True)
class Failure:
    """The end of a rank that failed, as the rank reports it or as the launcher saw it."""

    rank: int
    code: int
    """The exit code; below zero: the signal that ended it."""
    at: float
    """The time of the report, or when it was last seen alive, by the machine's clock."""
    text: str = ""
    """The rank's report, for the user; empty if it left none."""
    follows: bool = False
    """True if it reports that it lost its connection to another rank, whose report is better."""


class Notes:
    def __init__(self, folder: Path, reader: int | None = None) -> None:
        """Use `folder`; once `reader` is no longer the parent, nobody reads this rank's end."""
        self._folder = folder
        self._reader = reader
        self._place: int | None = None
        """The open file with what this process is doing."""

    def write_folder(self, folder: Path) -> None:
        """Write the path of the run's folder."""
        self._write("folder", str(folder.absolute()))

    def folder(self) -> Path | None:
        path = json_in(self._folder / "folder")
        return None if path is None else Path(path)

    def write_place(self, rank: int, place: str) -> None:
        """Write what the rank is doing, such as "step 12, training".

        Called before each phase, so that a death in it is named: one write in place, some
        microseconds, which the system keeps if the process is killed the moment after.
        """
        with suppress(OSError):  # as in `_write`
            if self._place is None:
                path = self._folder / f"place-{rank}"
                self._place = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._place, json.dumps(place).ljust(PLACE_BYTES).encode(), 0)

    def place(self, rank: int) -> str | None:
        return json_in(self._folder / f"place-{rank}") or json_in(self._folder / f"left-{rank}")

    def leave(self, rank: int, place: str) -> None:
        """Announce an end without failure, by a rename, which works on a full disk, too."""
        self.write_place(rank, place)
        with suppress(OSError):
            (self._folder / f"place-{rank}").rename(self._folder / f"left-{rank}")

    def announced(self, rank: int) -> float | None:
        """Return when the rank announced its end, good or bad, by the machine's clock."""
        if (end := self.end(rank)) is not None:
            return end.at
        with suppress(OSError):
            return (self._folder / f"left-{rank}").stat().st_mtime
        return None

    def write_end(self, rank: int, text: str, code: int, follows: bool = False) -> bool:
        """Write the end, unless the rank has; return True if the launcher is there to read it."""
        if self.end(rank) is None:
            self._write(f"end-{rank}", asdict(Failure(rank, code, time.time(), text, follows)))
        return self._reader in (None, os.getppid()) and self.end(rank) is not None

    def end(self, rank: int) -> Failure | None:
        fields = json_in(self._folder / f"end-{rank}")
        return None if fields is None else Failure(**fields)

    def _write(self, name: str, value: object) -> None:
        # a launcher that is gone took its folder along; a full disk is reported elsewhere
        with suppress(OSError):
            publish_json(self._folder / name, value)


def notes_of(environment: Mapping[str, str]) -> Notes | None:
    """Return the notes of this project's launcher; None under another one, or without one."""
    return Notes(Path(environment[FOLDER]), os.getppid()) if FOLDER in environment else None


class Whereabouts:
    """The places of this machine's processes, for others that see one die under any launcher."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        with suppress(OSError):  # then the last beat has to do
            self._folder = private_folder() / f"places-{socket.gethostname()}"
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.glob("place-*"):
                if is_gone(int(path.name.rpartition("-")[2])):
                    path.unlink()
        self._notes = Notes(self._folder or Path(os.devnull))

    def write(self, place: str) -> None:
        self._notes.write_place(os.getpid(), place)

    def of(self, process: int) -> str | None:
        """Return what a process does, or did when it died; None if it is not known."""
        return self._notes.place(process)

    def forget(self) -> None:
        """Remove this process's entry."""
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / f"place-{os.getpid()}").unlink(missing_ok=True)
