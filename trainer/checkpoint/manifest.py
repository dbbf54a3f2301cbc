"""The list of a checkpoint's files with their sizes and SHA-256, and the check against it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from trainer.checkpoint.disk import flush, to_json, write_file
from trainer.checkpoint.safetensors_stream import FileRecord
from trainer.errors import Problem

MANIFEST = "manifest.json"
FORMAT = 1
_MEND = "Resume from an older checkpoint"


def write_manifest(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Flush everything in `folder` to the disk and write its manifest last.

    `known` are the files that are already flushed and hashed, by their path below `folder`.
    """
    records = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            flush(path)
        elif name not in records:
            flush(path)
            records[name] = hash_file(path)
    files = {name: asdict(record) for name, record in records.items()}
    write_file(folder / MANIFEST, to_json({"format": FORMAT, "files": files}))
    flush(folder)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint by their path below `folder`.

    Raises OSError if there is no manifest, and ValueError if it is not as `write_manifest` left it.
    """
    content = (folder / MANIFEST).read_bytes()
    try:
        parsed = json.loads(content)
        files = {name: FileRecord(**record) for name, record in parsed["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged ({error!r})") from error
    if parsed.get("format") != FORMAT:
        raise ValueError(f"format {parsed.get('format')!r}, where this version reads {FORMAT}")
    if to_json(parsed) != content:
        raise ValueError("damaged (it is not in the form in which it was written)")
    if astray := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise ValueError(f"a path that leaves the folder: {astray[0]}")
    return files


def verify(path: Path) -> list[Problem]:
    """What is wrong with the files of a checkpoint; empty if each is, byte for byte, what was saved."""
    return check(path, _wrong_size) or check(path, _wrong_content)


def check_sizes(path: Path) -> list[Problem]:
    """The fast half of `verify`: reads no tensor."""
    return check(path, _wrong_size)


def check(path: Path, wrong: Callable[[Path, FileRecord], tuple[str, str] | None]) -> list[Problem]:
    """A Problem for each file of the manifest for which `wrong` answers (seen, expected)."""
    try:
        records = read_manifest(path)
    except (OSError, ValueError) as error:
        seen = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return [Problem(str(path / MANIFEST), seen, "the manifest that was saved", _MEND)]
    found = []
    for name, record in records.items():
        try:
            fault = wrong(path / name, record)
        except OSError as error:
            fault = error.strerror or str(error), "a file that can be read"
        if fault:
            found.append(Problem(str(path / name), *fault, _MEND))
    return found


def hash_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def _wrong_size(path: Path, record: FileRecord) -> tuple[str, str] | None:
    count = path.stat().st_size
    return None if count == record.size else (f"{count} bytes", f"{record.size} bytes")


def _wrong_content(path: Path, record: FileRecord) -> tuple[str, str] | None:
    digest = hash_file(path).sha256
    return None if digest == record.sha256 else (f"SHA-256 {digest[:12]}...", f"{record.sha256[:12]}...")
