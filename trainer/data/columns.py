"""Columns that a run computes of its samples: a folder of arrays that appears whole, and sealed.

A description beside them says what they were computed of, which a reader compares.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainer.data.sealed import flaw, seal
from trainer.errors import DataError, Problem
from trainer.storage import Json, disk_errors, json_in, rename_folder, write_file

Columns = Mapping[str, np.ndarray]
"""The arrays of a folder by name, each with a row for each sample or target."""


def description_in(place: Path) -> Path:
    """Return the path of the description in a folder of columns."""
    return place / f"{place.name}.json"


def write(place: Path, known: Json, parts: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write arrays into the folder `place`; further parts of the same name are appended.

    `known`: what they were computed of. Raises DiskError.
    """
    partial = place.parent / f".partial-{place.name}"
    files: dict[str, _Growing] = {}
    try:
        for name, values in parts:
            with disk_errors(place):
                if name not in files:
                    if not files:
                        shutil.rmtree(partial, ignore_errors=True)
                        partial.mkdir(parents=True)
                    files[name] = _Growing(partial / f"{len(files)}.npy")
                files[name].append(values)
        with disk_errors(place):
            for file in files.values():
                file.finish()
            names = {name: file.name for name, file in files.items()}
            content = json.dumps({**known, "files": names}, indent=1).encode()
            write_file(partial / description_in(place).name, content)
            seal(partial)
            shutil.rmtree(place, ignore_errors=True)
            rename_folder(partial, place)
    finally:
        for file in files.values():
            file.close()


def description(place: Path, expected: str, hint: str) -> Json:
    """Return what columns were computed of, with the names of their files.

    Raises DataError if the folder is missing or damaged.
    """
    if problem := flaw(place, rest=False):
        raise DataError(Problem(str(place), problem, expected, hint))
    return json_in(description_in(place))  # type: ignore[no-any-return]


def read(place: Path, known: Json, expected: str, hint: str) -> Columns:
    """Open the columns of a folder, memory-mapped.

    Raises DataError if they are missing or damaged, or were computed of others than `known`.
    """
    written = description(place, expected, hint)
    for name, value in known.items():
        if written.get(name) != value:
            actual = f"it was computed of other {name}"
            if max(len(_short(value)), len(_short(written.get(name)))) < LONG:
                actual = f"{actual}: {_short(written.get(name))}"
            of_run = f"those of this run: {_short(value)}"
            raise DataError(Problem(str(place), actual, of_run, hint))
    return {
        name: np.load(place / file, mmap_mode="r", allow_pickle=False)
        for name, file in written["files"].items()
    }


LONG = 40
"""The letters of a value that are shown; a longer one, as a hash, says nothing to the user."""


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."


class _Growing:
    """A NumPy file whose first dimension grows; NumPy leaves room for its length in the header."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file: BinaryIO = open(path, "wb")
        self._dtype = np.dtype(np.float64)
        self._shape: tuple[int, ...] | None = None

    def append(self, values: np.ndarray) -> None:
        if self._shape is None:
            self._dtype = values.dtype
            self._shape = (0, *values.shape[1:])
            self._write_header()
        assert values.dtype == self._dtype
        assert values.shape[1:] == self._shape[1:]
        self._file.write(np.ascontiguousarray(values).tobytes())
        self._shape = (self._shape[0] + len(values), *self._shape[1:])

    def finish(self) -> None:
        """Write the number of rows, and close the file."""
        self._file.seek(0)
        self._write_header()
        self.close()

    def close(self) -> None:
        self._file.close()

    def _write_header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": self._shape,
        }
        np.lib.format.write_array_header_1_0(self._file, described)
