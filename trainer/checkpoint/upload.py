"""Copies of a run at an address of fsspec, such as `s3://bucket/runs`.

They are made behind the training, and read where nothing of the run is left.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec

from trainer.checkpoint.directory import published, step_of
from trainer.checkpoint.folders import PARTIAL
from trainer.checkpoint.manifest import MANIFEST, STEP_FOLDER, read_manifest
from trainer.errors import DiskError, Problem, named_line, refused
from trainer.storage import rename_folder

KEY = "trainer.checkpoint.upload"
RECORDS = ("config.json", "environment.json", "metrics.jsonl")
"""The files of a run by which it is known, and goes on where it was."""
MODELS = ("final", "final-merged")


def check(address: str) -> None:
    """Raise ConfigError unless the address can be written."""
    expected = "an address of fsspec that you may write, such as s3://bucket/runs"
    with refused(f"{KEY}: {address}", expected, named=True):
        files, root = _opened(address.rstrip("/"))
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/.meshloom", b"")
        files.rm_file(f"{root}/.meshloom")


class Upload:
    """The copy of one run's folder, which a thread brings up to date.

    The manifest of a checkpoint is written last, and removed first: what has none is never read.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self._folder = f"{address.rstrip('/')}/{folder.name}", folder
        self._thread: Thread | None = None
        self._asked = False

    def soon(self, note: Callable[[str], None]) -> None:
        """Have the copy brought up to date, at once or after the update that goes on.

        `note` is told of one that failed; the next tries again what is missing.
        """
        self._asked = True
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._run, args=(note,), name="upload", daemon=True)
            self._thread.start()

    def finish(self) -> str:
        """Bring the copy up to date, with the final model; return its address. Raises DiskError."""
        if self._thread is not None:
            self._thread.join()
        with _copying(self._address, f"All is in {self._folder}: copy it, or start again"):
            self._update(*(name for name in MODELS if (self._folder / name).is_dir()))
        return self._address

    def _run(self, note: Callable[[str], None]) -> None:
        while self._asked:
            self._asked = False
            try:
                self._update()
            except Exception as error:  # the file system's, its client's or the network's
                why = named_line(error)
                note(
                    f"note: not copied to {self._address} ({why}); the next checkpoint tries again"
                )

    def _update(self, *models: str) -> None:
        files, root = _opened(self._address)
        here, there = published(self._folder / "checkpoints"), _steps(files, root)
        for path in reversed(here):
            if not files.exists(f"{root}/checkpoints/{path.name}/{MANIFEST}"):
                with suppress(FileNotFoundError):  # removed meanwhile, for a newer one
                    _put(files, path, f"{root}/checkpoints/{path.name}")
        gone = [there[name] for name in there.keys() - {path.name for path in here}]
        for old in (*gone, *(f"{root}/{name}" for name in models)):
            _remove(files, old)
        for name in models:
            _put(files, self._folder / name, f"{root}/{name}")
        for record in (self._folder / name for name in RECORDS):
            if record.is_file():
                files.put_file(str(record), f"{root}/{record.name}")


def restore(address: str, base: Path) -> list[str]:
    """Copy what is known of the runs of a name to `base` and its like; return lines for the user.

    The last one comes with its newest checkpoint. Raises DiskError.
    """
    with _copying(address, "Check the address, or start a run of its own with --fresh"):
        files, root = _opened(address.rstrip("/"))
        names = [Path(path).name for path in _listed(files, root)]
        runs = filter(re.compile(rf"{re.escape(base.name)}(-\d+)?").fullmatch, names)
        known = sorted(runs, key=lambda name: (len(name), name))
        for name in known:
            for record in (file for file in RECORDS if files.exists(f"{root}/{name}/{file}")):
                base.with_name(name).mkdir(parents=True, exist_ok=True)
                files.get_file(f"{root}/{name}/{record}", str(base.with_name(name) / record))
        steps = _steps(files, f"{root}/{known[-1]}") if known else {}
        there = {name: at for name, at in steps.items() if files.exists(f"{at}/{MANIFEST}")}
        if not there:
            return []
        newest = max(there, key=lambda name: step_of(Path(name)))
        target = base.with_name(known[-1]) / "checkpoints" / newest
        partial = target.with_name(newest + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files.get_file(f"{there[newest]}/{MANIFEST}", str(partial / MANIFEST))
        for name in read_manifest(partial):  # which names no path that leaves the folder
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            files.get_file(f"{there[newest]}/{name}", str(partial / name))
        rename_folder(partial, target)
    return [f"{newest} was copied from {address}"]


def _opened(address: str) -> tuple[Any, str]:
    files, root = fsspec.core.url_to_fs(address)
    files.invalidate_cache()
    return files, root


@contextmanager
def _copying(address: str, hint: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the file system's, its client's or the network's
        expected = "a copy that is complete"
        raise DiskError(Problem(f"{KEY}: {address}", named_line(error), expected, hint)) from error


def _put(files: Any, folder: Path, target: str) -> None:
    """Copy a folder's files, the manifest last."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(paths, key=lambda path: path == folder / MANIFEST):
        to = f"{target}/{path.relative_to(folder).as_posix()}"
        files.makedirs(to.rpartition("/")[0], exist_ok=True)
        files.put_file(str(path), to)


def _listed(files: Any, root: str) -> list[str]:
    return files.ls(root, detail=False) if files.exists(root) else []


def _steps(files: Any, root: str) -> dict[str, str]:
    """Return the checkpoints at an address, whole or not: name -> path."""
    found = {Path(path).name: path for path in _listed(files, f"{root}/checkpoints")}
    return {name: path for name, path in found.items() if STEP_FOLDER.fullmatch(name)}


def _remove(files: Any, path: str) -> None:
    if files.exists(f"{path}/{MANIFEST}"):
        files.rm_file(f"{path}/{MANIFEST}")
    if files.exists(path):
        files.rm(path, recursive=True)
