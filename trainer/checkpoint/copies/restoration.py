"""Runs that are copied back from an address (`upload.py`), where nothing of them is left.

A restore has these states, by the names of folders beside the run's:

    nothing      there is no such folder, and no run of the name
    restoring    `.NAME.restoring` is filled: the records of all runs of the name, and the newest
                 checkpoint of the last one, whose hashes are compared. Nobody looks there
    restored     by one rename it is `.NAME.restored`: all is here
    in place     its parts were renamed into the runs' folders, of each its `config.json`, which
                 makes it a run, as the last; the empty folder is removed

A start that finds `.NAME.restoring` of a process that died removes it, and restores again; one that
finds `.NAME.restored` renames what is left in it, without the network.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path
from threading import Lock

from trainer.checkpoint import faults
from trainer.checkpoint.copies.bucket import Bucket, in_streams
from trainer.checkpoint.copies.marks import (
    KEY,
    MARK,
    copying,
    last_writer,
    left_mark,
    mark_at,
    marked_at,
)
from trainer.checkpoint.copies.upload import RECORDS
from trainer.checkpoint.directory import out_of_the_way, published
from trainer.checkpoint.manifest import MANIFEST, read_manifest, verify
from trainer.data.progress import QUIET, Progress
from trainer.errors import DiskError, Problem
from trainer.storage import (
    disk_errors,
    ensure_writable,
    flush,
    parse_json,
    rename_folder,
    to_json,
    write_file,
)

_HASHED = 1e8
"""The lowest speed, in bytes/s, at which hashes are compared."""


def restore(address: str, base: Path, progress: Progress = QUIET) -> list[str]:
    """Copy the runs `base.name`, `base.name-2` and so on from an address to where `base` is.

    The last one gets its newest good checkpoint, too. Returns lines for the user; empty if there is
    no such run. Raises DiskError if the address can't be read, another process writes the last
    run, or all its checkpoints are damaged.
    """
    address = address.rstrip("/")
    settle(base)
    with copying(address, "Check the address, or start a new run with --fresh"):
        runs = filter(
            re.compile(rf"{re.escape(base.name)}(-\d+)?").fullmatch, Bucket(address).names()
        )
        known = sorted(runs, key=lambda name: (len(name), name))
        if not known:
            return []
        last = known[-1]
        mark = left_mark(f"{address}/{last}", progress.moves)
        lines = [f"{address}/{last} is taken over: it was {last_writer(mark)}"]
        lines = [] if mark.get("ended", not mark) else lines
        staging, ready = _stages(base)
        with disk_errors(staging):
            staging.mkdir(parents=True)
        for name in known:
            damaged: dict[str, str] = {}
            if _fetch_records(f"{address}/{name}", staging / name) and name == last:
                came, damaged = _fetch_newest(f"{address}/{name}", staging / name, progress)
                lines += [*damaged.values(), *came]
            follows = mark if name == last else mark_at(f"{address}/{name}")
            own = {"token": uuid.uuid4().hex, "follows": follows.get("token")}
            write_file(staging / name / MARK, to_json({**own, "damaged": sorted(damaged)}))
    with disk_errors(staging):
        faults.at("restored")
        rename_folder(staging, ready)
    settle(base)
    return lines


def settle(base: Path) -> None:
    """Move what an earlier restore has copied to its place, and remove an unfinished restore."""
    staging, ready = _stages(base)
    with disk_errors(base.parent):
        shutil.rmtree(staging, ignore_errors=True)
        for run in sorted(ready.iterdir()) if ready.is_dir() else ():
            target = base.with_name(run.name)
            (target / "checkpoints").mkdir(parents=True, exist_ok=True)
            for path in published(run / "checkpoints"):
                faults.at("restored")
                _make_way(target / "checkpoints" / path.name, path)
                rename_folder(path, target / "checkpoints" / path.name)
            for name in (MARK, *reversed(RECORDS)):  # by the last of which it is a run
                faults.at("restored")
                if (run / name).exists():
                    os.replace(run / name, target / name)
            flush(target)
        shutil.rmtree(ready, ignore_errors=True)


def has_restored(base: Path) -> bool:
    """Return True if a restore ended before all was in its place."""
    return any(map(Path.is_dir, _stages(base)))


def _stages(base: Path) -> tuple[Path, Path]:
    return base.with_name(f".{base.name}.restoring"), base.with_name(f".{base.name}.restored")


def _make_way(there: Path, came: Path) -> None:
    """Make way for a restored checkpoint: remove an equal one in its place, rename another one."""
    if there.is_dir():
        own, other = (one / MANIFEST for one in (came, there))
        if other.is_file() and own.read_bytes() == other.read_bytes():
            shutil.rmtree(there)
        else:
            out_of_the_way(there)


def _fetch_records(address: str, folder: Path) -> bool:
    """Copy the records of a run to a folder, which is made; return False if it has no config."""
    bucket = Bucket(address)
    with disk_errors(folder):
        folder.mkdir()
    there = set(bucket.names()).intersection(RECORDS)
    for name in there:
        bucket.get(name, folder / name)
        if name.endswith(".json"):
            try:
                parse_json((folder / name).read_bytes())
            except ValueError as error:
                raise ValueError(f"{name} is damaged: {error}") from error
    return RECORDS[0] in there


def _fetch_newest(
    address: str, folder: Path, progress: Progress
) -> tuple[list[str], dict[str, str]]:
    """Copy the newest good checkpoint of a run; return lines, and a line for each damaged one.

    Raises DiskError if there are checkpoints, and none is good.
    """
    damaged: dict[str, str] = {}
    for name in reversed(marked_at(Bucket(address))):
        path = folder / "checkpoints" / name
        if (problem := _fetch(address, path, progress)) is None:
            return [f"{name} was copied from {address.rpartition('/')[0]}"], damaged
        damaged[name] = f"{name} at {address} is damaged, and is not read: {problem}"
        shutil.rmtree(path)
    if damaged:
        hint = "Repair one there, or start a new run with --fresh and another name"
        expected = "a checkpoint that is good"
        raise DiskError(Problem(f"{KEY}: {address}", "; ".join(damaged.values()), expected, hint))
    return [], damaged


def _fetch(address: str, path: Path, progress: Progress) -> str | None:
    """Copy a checkpoint to a path; return what is wrong with it, if anything is."""
    place = f"checkpoints/{path.name}"
    lock = Lock()
    done = 0
    whole = 0

    def moved(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress.say(f"copied {done / 1e6:,.0f} of {whole / 1e6:,.0f} MB")

    bucket = Bucket(address, moved)
    progress.begin(f"{address}/{place}")
    try:
        path.mkdir(parents=True)
        bucket.get(f"{place}/{MANIFEST}", path / MANIFEST)
        records = read_manifest(path)  # which names no path that leaves the folder
        whole = sum(record.size for record in records.values())
        ensure_writable(path, whole)

        def fetch(name: str) -> None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            bucket.get(f"{place}/{name}", path / name)
            if (came := (path / name).stat().st_size) != records[name].size:
                raise ValueError(f"{name}: {came} bytes; expected {records[name].size}")
            flush(path / name)

        in_streams(fetch, records)
    except (FileNotFoundError, ValueError) as error:
        return str(error) or type(error).__name__
    finally:
        progress.close()
    progress.moves(whole / _HASHED)
    return next((str(problem) for problem in verify(path)), None)
