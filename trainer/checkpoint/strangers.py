"""Strangers in a checkpoint's folder: files that its manifest lacks, and links that leave it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint.manifest import MANIFEST, PICKLES, read_manifest
from trainer.errors import Problem

WEIGHTS = {".safetensors", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", *PICKLES}
"""The endings of files that libraries read as weights, some before those of the manifest."""
_INDEX = ".index.json"
_HINT = "Move it away: no hash vouches for it"


def strangers(path: Path) -> tuple[list[Problem], list[str]]:
    """Return the problems of entries in a checkpoint's folder, and the names of harmless files.

    Problems are weights that the manifest does not list, links that leave the folder, and entries
    that are neither files nor folders. Other files that it does not list are harmless. Raises
    OSError, ValueError and ConfigError as `read_manifest` does.
    """
    records = read_manifest(path)
    root = path.resolve()
    problems = []
    others = []
    for entry in _entries(path):
        name = entry.relative_to(path).as_posix()
        if entry.is_symlink() and not _resolved(entry).is_relative_to(root):
            actual = f"a link to {os.readlink(entry)}, out of the folder"
            problems.append(Problem(str(entry), actual, "a file of the checkpoint", _HINT))
        elif not _is_plain(entry):
            actual = "neither a file nor a folder"
            problems.append(Problem(str(entry), actual, "files of the checkpoint", _HINT))
        elif name not in records and name != MANIFEST and not entry.is_dir():
            if entry.suffix in WEIGHTS or name.endswith(_INDEX):
                actual = "weights that the manifest does not list"
                problems.append(Problem(str(entry), actual, "its files alone", _HINT))
            else:
                others.append(name)
    return problems, others


def _entries(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below a folder, without following links."""
    for here, folders, files in os.walk(folder):
        yield from (Path(here, name) for name in sorted([*folders, *files]))


def _resolved(link: Path) -> Path:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # a circle of links
        return Path("/")


def _is_plain(entry: Path) -> bool:
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link within the folder to nothing
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
