"""Copies of a run at an address of fsspec, such as `s3://bucket/runs`.

They are made behind the training, and read where nothing of the run is left. One process at a time
writes the copy of a run: its mark is there, with a sign of life every few seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fsspec

from trainer.checkpoint.directory import published, step_of
from trainer.checkpoint.folders import PARTIAL
from trainer.checkpoint.manifest import MANIFEST, STEP_FOLDER, read_manifest
from trainer.errors import DiskError, MeshloomError, Problem, named_line, refused
from trainer.storage import parse_json, rename_folder, to_json, write_file

KEY = "trainer.checkpoint.upload"
RECORDS = ("config.json", "environment.json", "metrics.jsonl")
"""The files of a run by which it is known, and goes on where it was."""
MODELS = ("final", "final-merged")
MARK = "upload.json"
"""The file at a copy, with who writes it and the token of the folder that the copy is of.

The run's folder has one with its own token, and that of the copy it was made from."""
SIGN_SECONDS, PATIENCE_SECONDS = 10.0, 45.0
"""Seconds between two signs of life, and without one until the writer is taken to be dead."""


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
        self._mark: dict[str, Any] = {}
        self._ended = Event()
        self._signs = Thread(target=self._give_signs, name="signs of life", daemon=True)

    def claim(self, own: Mapping[str, Any]) -> None:
        """Become the only writer of the copy until `finish`; `own` is the mark of the run's folder.

        Raises DiskError if the copy is of another folder.
        """
        with _copying(self._address, "Check the address"):
            if (found := mark_at(self._address)) and found["token"] not in own.values():
                raise _foreign(self._address, found)
            self._mark = {"token": own["token"], "by": f"{socket.gethostname()}, {os.getpid()}"}
            self._sign()
        self._signs.start()

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
            self._ended.set()
            if self._mark:
                self._signs.join()
                self._sign(ended=True)  # so that another machine need not wait
        return self._address

    def close(self) -> None:
        """Give no more signs of life, and begin no update; the one that goes on ends."""
        self._asked = False
        self._ended.set()
        for thread in (self._thread, self._signs):
            if thread is not None and thread.is_alive():
                thread.join()

    def _give_signs(self) -> None:
        while not self._ended.wait(SIGN_SECONDS):
            with suppress(Exception):  # the network's: the next one may arrive
                self._check()
                self._sign()

    def _sign(self, ended: bool = False) -> None:
        files, root = _opened(self._address)
        files.makedirs(root, exist_ok=True)
        own = {"time": time.time(), "ended": ended}
        files.pipe_file(f"{root}/{MARK}", to_json({**self._mark, **own}))

    def _check(self) -> None:
        """Raise DiskError if the copy is another folder's, or another process's, by now."""
        if not self._mark.items() <= (found := mark_at(self._address)).items():
            raise _foreign(self._address, found)

    def _run(self, note: Callable[[str], None]) -> None:
        while self._asked:
            self._asked = False
            try:
                self._update()
            except MeshloomError as error:
                note(f"note: {error}")
            except Exception as error:  # the file system's, its client's or the network's
                why = f"{self._address} ({named_line(error)})"
                note(f"note: not copied to {why}; the next checkpoint tries again")

    def _update(self, *models: str) -> None:
        self._check()
        files, root = _opened(self._address)
        here, there = published(self._folder / "checkpoints"), _steps(files, root)
        for path in reversed(here):
            if not files.exists(f"{root}/checkpoints/{path.name}/{MANIFEST}"):
                with suppress(FileNotFoundError):  # removed meanwhile, for a newer one
                    _put(files, path, f"{root}/checkpoints/{path.name}", self._check)
        self._check()
        gone = [there[name] for name in there.keys() - {path.name for path in here}]
        for old in (*gone, *(f"{root}/{name}" for name in models)):
            _remove(files, old)
        for name in models:
            _put(files, self._folder / name, f"{root}/{name}", self._check)
        for record in (self._folder / name for name in RECORDS):
            if record.is_file():
                files.put_file(str(record), f"{root}/{record.name}")


def restore(address: str, base: Path) -> list[str]:
    """Copy what is known of the runs of a name to `base` and its like; return lines for the user.

    The last one comes with its newest checkpoint, once nobody else writes it. Raises DiskError.
    """
    with _copying(address, "Check the address, or start a run of its own with --fresh"):
        files, root = _opened(address := address.rstrip("/"))
        names = [Path(path).name for path in _listed(files, root)]
        runs = filter(re.compile(rf"{re.escape(base.name)}(-\d+)?").fullmatch, names)
        known = sorted(runs, key=lambda name: (len(name), name))
        if not known:
            return []
        last = base.with_name(known[-1])
        mark = _left_mark(f"{address}/{last.name}")
        lines = [f"{address}/{last.name} is taken over: it was {_seen(mark)}"]
        lines = [] if mark.get("ended", not mark) else lines
        steps = _steps(files, f"{root}/{last.name}")
        there = {name: at for name, at in steps.items() if files.exists(f"{at}/{MANIFEST}")}
        if newest := max(there, key=lambda name: step_of(Path(name)), default=None):
            target = last / "checkpoints" / newest
            partial = target.with_name(newest + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            files.get_file(f"{there[newest]}/{MANIFEST}", str(partial / MANIFEST))
            for name in read_manifest(partial):  # which names no path that leaves the folder
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(f"{there[newest]}/{name}", str(partial / name))
            rename_folder(partial, target)
            lines.append(f"{newest} was copied from {address}")
        for name in reversed(known):  # then what makes it a run of this machine
            (folder := base.with_name(name)).mkdir(parents=True, exist_ok=True)
            own = {"token": uuid.uuid4().hex, "follows": mark.get("token")}
            write_file(folder / MARK, to_json(own))
            for record in reversed(RECORDS):
                if files.exists(f"{root}/{name}/{record}"):
                    files.get_file(f"{root}/{name}/{record}", str(folder / record))
    return lines


def mark_at(address: str) -> dict[str, Any]:
    """Return the mark of a copy, or of a run's folder; {} for none."""
    files, root = _opened(address)
    with suppress(FileNotFoundError):
        return dict(parse_json(files.cat_file(f"{root}/{MARK}")))
    return {}


def _left_mark(address: str) -> dict[str, Any]:
    """Return a copy's mark if its run has ended, or there is no sign of life; {} for none.

    No clocks of two machines are compared. Raises DiskError at a sign of life.
    """
    first, deadline = mark_at(address), time.monotonic() + PATIENCE_SECONDS
    while not first.get("ended", not first) and time.monotonic() < deadline:
        time.sleep(SIGN_SECONDS / 10)
        if (found := mark_at(address)) != first:
            raise _foreign(address, found)
    return first


def _foreign(address: str, mark: Mapping[str, Any]) -> DiskError:
    own = "Set another trainer.run.name, or stop the other run"
    hint = f"{own}; with its folder here moved away, the same command goes on from that copy"
    expected = "a copy of this folder alone, to which nothing is written now"
    return DiskError(Problem(f"{KEY}: {address}", _seen(mark), expected, hint))


def _seen(mark: Mapping[str, Any]) -> str:
    return f"written by {mark.get('by', 'nobody')}, last seen {time.ctime(mark.get('time', 0))}"


def _opened(address: str) -> tuple[Any, str]:
    files, root = fsspec.core.url_to_fs(address)
    files.invalidate_cache()
    return files, root


def _copying(address: str, hint: str) -> AbstractContextManager[None]:
    place, expected = f"{KEY}: {address}", "a copy that is complete"
    return refused(place, expected, named=True, mend=hint, raises=DiskError)


def _put(files: Any, folder: Path, target: str, check: Callable[[], None]) -> None:
    """Copy a folder's files, and after the `check` its manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(paths, key=lambda path: path == folder / MANIFEST):
        if path == folder / MANIFEST:
            check()
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
