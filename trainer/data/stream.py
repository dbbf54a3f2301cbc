"""A corpus as a stream of files, each prepared when its samples are needed, and removed after."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from trainer.config import DataSection
from trainer.data.cache import discard
from trainer.data.order import SampleOrder, Shuffle
from trainer.data.sources.location import format_of, locate
from trainer.data.sources.remote import listing_of
from trainer.data.text.token_files import PreparedSource
from trainer.data.workers import Beside
from trainer.errors import DataError, Problem
from trainer.tasks.task import Sample

_BITS = 40
"""The bits of a sample's number in its file; those above are the number of the file."""


class Place(NamedTuple):
    """A file of the stream, from which a run resumes."""

    turn: int = 0
    """The number of files before it, over all epochs."""
    position: int = 0
    """The number of samples before its first one."""
    fingerprint: str = ""
    """The digest of its samples; empty for one that was not opened, or may have changed."""


class Files(Protocol):
    """The files of a stream, by their numbers."""

    def __len__(self) -> int: ...

    def prepared(self, file: int) -> Path | None:
        """Prepare a file, and return its folder; None for a file to leave out."""

    def opened(self, folder: Path) -> PreparedSource:
        """Open the folder of a file. Raises FileNotFoundError if another run has removed it."""

    def awaits(self, file: int, since: float) -> None:
        """Note that a reader waits for a file, since a monotonic time."""

    def skips(self, file: int) -> None:
        """Note that a file is left out."""


class Stream:
    """The samples of one file after another: all files in a shuffled order, then again in another.

    A file's samples are shuffled, too. The order is a function of the seed and of the numbers of
    samples in the files. A process beside this one prepares the next file; what is two files back
    is removed from the cache, but for file 0.
    """

    def __init__(
        self,
        files: Files,
        seed: int,
        kept: Sequence[Path],
    ) -> None:
        """Take the files; `kept`: the folders that are never removed, that of file 0 first."""
        self.files = len(files)
        self._seed = seed
        self._files = files
        self._kept = kept
        self._first = files.opened(kept[0])
        self._turns = Shuffle(len(files), SampleOrder(seed))
        self._beside: Beside
        self._is_read = False
        """True once its reader has ended."""
        self._since: float | None = None
        """The monotonic time since when a file is waited for of which samples are needed."""
        self._sources: dict[int, PreparedSource] = {}
        self._folders: dict[int, Path] = {}
        self._shuffles: dict[int, Shuffle] = {}
        self._known: dict[int, str] = {}
        """The digests of the files opened since the start."""
        self._places: list[Place] = []
        """Those of the files opened since the start, and of the next one."""

    def __len__(self) -> int:
        """Return the samples of file 0, of which alone the number is known at once."""
        return len(self._first)

    def __getitem__(self, index: int) -> Sample:
        file = index >> _BITS
        number = index % (1 << _BITS)
        return self._first[number] if file == 0 else self._sources[file][number]

    def begin(self, place: Place) -> None:
        """Continue from a place."""
        self._is_read = False
        self._places = [place]
        self._beside = Beside(self._files.prepared)
        self._beside.begin(self._file(place.turn))

    def reach(self, position: int) -> None:
        """Open the files up to a position; waits for those that are not prepared yet.

        Raises DataError for a file that can't be read, or has changed.
        """
        while not self.reaches(position):
            self._open_next()

    def reaches(self, position: int) -> bool:
        """Return True if the files up to a position are open."""
        return self._places[-1].position > position

    def has(self, position: int) -> bool:
        """Return True unless the samples up to a position are still to come.

        They aren't if their reader has ended: it hands on an error in their place.
        """
        return self._is_read or self.reaches(position)

    def end_reading(self) -> None:
        """Note that nobody opens the next files."""
        self._is_read = True

    def samples(self, positions: np.ndarray) -> list[tuple[int, int]]:
        """Return the ids and epochs of the samples at positions in the stream, int64 [samples].

        Those before the first one can no longer be read.
        """
        self._forget(self.place(int(positions.min())).turn)
        samples = []
        for (turn, start, _), some in groupby(positions.tolist(), self.place):
            numbers = self._shuffles[turn].ids(np.array(list(some)) - start)
            first = self._file(turn) << _BITS
            epoch = turn // self.files
            samples += [(first + number, epoch) for number in numbers.tolist()]
        return samples

    def place(self, position: int) -> Place:
        """Return the place of the file with a sample, from which a run resumes there."""
        places = self._places
        return places[bisect_right(places, position, key=lambda place: place.position) - 1]

    def waits(self) -> None:
        """Note that samples are waited for, which is no hang while their file is prepared."""
        if (since := self._since) is not None:
            self._files.awaits(self._file(self._places[-1].turn), since)

    def close(self) -> None:
        """End the process that prepares."""
        self._beside.close()

    def _file(self, turn: int) -> int:
        return int(self._turns.ids(np.array([turn]))[0])

    def _open_next(self) -> None:
        turn, position, expected = self._places[-1]
        file = self._file(turn)
        source = None
        while source is None:
            self._since = time.monotonic()
            folder = self._beside.result()
            self._since = None
            if folder is None:
                break
            with suppress(FileNotFoundError):  # another run has removed it meanwhile
                source = self._files.opened(folder)
            self._beside.begin(file if source is None else self._file(turn + 1))
        fingerprint = "" if source is None else source.summary.fingerprint
        expected = expected or self._known.setdefault(file, fingerprint)
        if fingerprint != expected:
            place = f"file {file} of the stream"
            wanted = f"those of before, {expected[:12]}..." if expected else "none, as before"
            actual = f"samples {fingerprint[:12]}..." if fingerprint else "no samples"
            hint = "Undo the change, or resume anyway with --resume-anyway"
            raise DataError(Problem(place, actual, wanted, hint))
        if source is None:
            self._files.skips(file)
            self._beside.begin(self._file(turn + 1))
            self._places[-1] = Place(turn + 1, position)
            return
        self._sources[file] = source
        self._folders[file] = folder
        self._shuffles[turn] = Shuffle(len(source), SampleOrder(self._seed), turn)
        after = Place(turn + 1, position + len(source))
        self._places[-1:] = [Place(turn, position, fingerprint), after]

    def _forget(self, turn: int) -> None:
        """Remove the files before the one that precedes this turn, unless one comes again soon."""
        kept = {0, *map(self._file, range(max(turn - 1, 0), self._places[-1].turn + 1))}
        for file in self._folders.keys() - kept:
            del self._sources[file]
            if (folder := self._folders.pop(file)) not in self._kept:
                with suppress(OSError):  # another user's
                    discard(folder)


def stream_files(data: DataSection) -> dict[str, int | None]:
    """Return the names of a stream's files, and their bytes if they are known. Raises DataError."""
    sizes: dict[str, int | None] = {}
    for name in [data.path] if isinstance(data.path, str) else data.path or []:
        if "://" in name:
            there = listing_of(name)
            sizes |= {there.system.unstrip_protocol(path): n for path, n in there.files.items()}
        else:
            sizes |= {str(file): file.stat().st_size for file in locate(name, data.format).files}
    for name, size in sizes.items():
        if data.format == "auto":
            format_of(Path(name))
        if size == 0:
            raise DataError(Problem(name, "an empty file", "files of a stream that have samples"))
    if not sizes:
        raise DataError(Problem(f"trainer.data.stream: {data.path}", "no files", "files"))
    return sizes
