"""The manifest of a checkpoint, its files with sizes and hashes, and its description."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Any

from trainer.checkpoint.file_records import (
    PARTS,
    FileRecord,
    Hashed,
    Records,
    Span,
    digest_of,
    is_whole,
    kind_of,
    new_hash,
    shown,
    span,
)
from trainer.checkpoint.parts_file import read_line
from trainer.checkpoint.safetensors_stream import read_header
from trainer.distributed.ranks import ALONE, Ranks
from trainer.errors import ConfigError, DiskError, Problem, refused
from trainer.storage import Json, check_regular, flush, parse_json, read_file, to_json, write_file

MANIFEST = "manifest.json"
DESCRIPTION = "trainer.json"
FORMAT = 2
WITH_BLAKE3 = 3
WITH_PARTS = 4
EARLIER = (1,)
"""The format that is written, those with BLAKE3 digests and with a file of parts, and older ones
that are still read."""
PICKLES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
"""Types of files that can run code when they are opened: none is ever opened."""
ALL = ("",)
WEIGHTS_ALONE = ("model/", DESCRIPTION)
"""Beginnings of paths: of all files, and of those that are read without optimizer state."""
STEP_FOLDER = re.compile(r"step-(\d{6,})")
_POSITION = {"step": int, "samples": int, "tokens": int, "engine": dict}
_DESCRIPTION: dict[str, tuple[type, ...]] = {
    name: (dict, NoneType) for name in ("code", "config", "data", "layout", "model", "versions")
}
_NO_EPOCH = {"loss": 0.0, "targets": 0.0}
"""The sums over the steps of an epoch that has just begun."""
_DESCRIPTION |= {
    "evaluation_loss": (float, int, NoneType),
    "stateless": (list, NoneType),
    "since": (dict, NoneType),
    "place": (list, NoneType),
}
"""The types of the entries of a description that are read, if present."""
_HINT = "Resume from an older checkpoint"
HINT_OPTIMIZER = f"{_HINT}, or without the optimizer's state by --resume-weights-only"


def write_manifest(folder: Path, known: Records) -> None:
    """Flush everything in `folder` to the disk and write its manifest last.

    `known` are the files that are flushed and hashed already, by their path below `folder`. Raises
    OSError.
    """
    records = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            flush(path)
        elif name not in records:
            flush(path)
            records[name] = hash_file(path)
    files = {name: record.to_json() for name, record in records.items()}
    write_file(folder / MANIFEST, to_json({"format": _format_of(records), "files": files}))
    flush(folder)


def _format_of(records: Records) -> int:
    if PARTS in records:
        return WITH_PARTS
    return WITH_BLAKE3 if any(record.in_blake3 for record in records.values()) else FORMAT


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the files of a checkpoint by their path below `folder`.

    Raises OSError if there is no manifest, ValueError if `write_manifest` did not write it so, and
    ConfigError for the format of a later version.
    """
    content = read_file(folder / MANIFEST)
    parsed = parse_json(content)
    if not isinstance(parsed, dict) or not isinstance(parsed.get("files"), dict):
        raise ValueError("damaged (no list of files)")
    if type(number := parsed.get("format")) is int and number > WITH_PARTS:
        actual = f"format {number}"
        expected = f"format {WITH_PARTS}, or an earlier one"
        raise ConfigError(Problem(str(folder), actual, expected, "Install a newer Meshloom"))
    if number not in (FORMAT, WITH_BLAKE3, WITH_PARTS, *EARLIER):
        raise ValueError(f"damaged (format {number!r:.50})")
    if to_json(parsed) != content:
        raise ValueError("damaged (it is not in the form in which it was written)")
    records = {name: _record(name, entry) for name, entry in parsed["files"].items()}
    if DESCRIPTION not in parsed["files"] and any(
        name.startswith("model/") for name in parsed["files"]
    ):
        raise ValueError(f"damaged (no {DESCRIPTION})")
    if PARTS not in records and not all(record.parts for record in records.values()):
        raise ValueError(f"damaged (no {PARTS})")
    return records


def _record(name: str, entry: Any) -> FileRecord:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"a path that leaves the folder: {name!r:.200}")
    if PurePosixPath(name).suffix in PICKLES:
        raise ValueError(f"a pickle, which is never opened: {name!r:.200}")
    try:
        if _is(entry, {"size": int, "sha256": str}) or _is(entry, {"size": int, "parts": list}):
            return FileRecord.of(**entry)
        if _is(entry, {"size": int, "parts": str}) and entry["parts"] == PARTS != name:
            return FileRecord.of(**entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"damaged (of {name!r:.200}: {error})") from error
    raise ValueError(f"damaged (no size and hash of {name!r:.200})")


def read_description(path: Path) -> Json:
    """Return the description of a run, with its `position`. Raises DiskError if it is damaged."""
    place = str(path / DESCRIPTION)
    expected = "the description that was saved"
    with refused(place, expected, OSError, ValueError, raises=DiskError):
        description = parse_json(read_file(path / DESCRIPTION))
    whole = isinstance(description, dict) and _is(description.get("position"), _POSITION)
    whole = whole and _is(description.get("epoch") or _NO_EPOCH, dict.fromkeys(_NO_EPOCH, float))
    if not whole or not all(
        isinstance(description.get(key), of) for key, of in _DESCRIPTION.items()
    ):
        raise DiskError(Problem(place, "not the description of a run", expected))
    if wrong := _wrong_position(path, description):
        expected = "where the run stood when it was saved"
        raise DiskError(Problem(place, f"position.{wrong}", expected))
    return description


def _wrong_position(path: Path, description: Json) -> str:
    """Return the first impossible field of a position with the reason, or an empty string."""
    position = description["position"]
    since = description.get("since")
    step = position["step"]
    samples = position["samples"]
    for key in ("step", "samples", "tokens"):
        if not 0 <= position[key] < 2**63:
            return f"{key} is {position[key]!r:.40}"
    for key, value in position["engine"].items():
        if type(value) not in (int, float) or not abs(value) < 2**63:
            return f"engine.{key} is {value!r:.40}"
    if (named := STEP_FOLDER.fullmatch(path.name)) and int(named[1]) != step:
        return f"step is {step}, in a folder of another name"
    if samples < step or (step == 0 and samples):
        return f"samples is {samples} after {step} steps"
    batch = (description.get("layout") or {}).get("train_batch")
    if since is None or not _is(since, {"step": int, "samples": int}) or type(batch) is not int:
        return ""
    # a resumed run with another batch size counts from where it was resumed
    expected = since["samples"] + (step - since["step"]) * batch
    if samples == expected:
        return ""
    return f"samples is {samples}, where steps of {batch} make {expected}"


def _is(value: object, kinds: Mapping[str, type]) -> bool:
    """Return True if a parsed value has exactly these fields, of these types."""
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(type(value[name]) is kind for name, kind in kinds.items())
    )


def verify(path: Path, ranks: Ranks = ALONE, below: tuple[str, ...] = ALL) -> list[Problem]:
    """List the problems of a checkpoint's files; empty if each is, byte for byte, as it was saved.

    Checks only paths that begin with one of `below`. Collective: each rank hashes its share. Raises
    ConfigError as `verify_each` does.
    """
    problems = verify_each(path, ranks, below).values()
    return [problem for of_folder in problems for problem in of_folder]


def verify_each(path: Path, ranks: Ranks, below: tuple[str, ...] = ALL) -> dict[int, list[Problem]]:
    """Verify each run folder as `verify` does; return problems by the first rank that sees it.

    Raises ConfigError for a later format, and if the package of a hash is missing.
    """
    problems_of: dict[int, dict[str, Problem]] = {}
    mine = ranks.on_own(lambda: _check_content(path, ranks, below))
    for node_first, problems in ranks.gather((ranks.node_first, mine)):
        by_place = problems_of.setdefault(node_first, {})
        for problem in problems:
            by_place.setdefault(problem.place, problem)
    return {rank: [each[place] for place in sorted(each)] for rank, each in problems_of.items()}


def check_sizes(path: Path, below: tuple[str, ...] = ALL) -> list[Problem]:
    """List the problems that show without hashing, as `verify` does. Not collective.

    Checks sizes, the headers of tensors' files and the description; reads no tensor. Raises
    ConfigError for a later format.
    """
    records, problems = _records(path)
    for name in _by_size(records, below):
        problems += _problems(path, name, partial(_wrong_file, records[name], _wrong_size))
    return problems


def _check_content(path: Path, ranks: Ranks, below: tuple[str, ...]) -> list[Problem]:
    """List the problems of this rank's share of the files, and of the parts that ranks listed."""
    records, problems = _records(path)
    beside = ranks.beside
    share = slice(beside.index(ranks.rank), None, len(beside))
    for line in records[PARTS].parts[share] if PARTS in records else ():
        problems += _problems_of_line(path, line, records, below)
    for name in _by_size(records, below)[share]:
        # the lines of parts are checked where they are read
        wrong = _wrong_size if name == PARTS else _wrong_content
        problems += _problems(path, name, partial(_wrong_file, records[name], wrong))
    return problems


def _problems_of_line(
    path: Path, line: Hashed, records: Records, below: tuple[str, ...]
) -> list[Problem]:
    try:
        listed = read_line(path, line, records)
    except (OSError, ValueError) as error:
        expected = "the parts that were saved"
        return [Problem(_shown(path / PARTS), _reason(error), expected, _HINT)]
    files = [(name, parts) for name, parts in listed.items() if name.startswith(below)]
    checked = (_problems(path, name, partial(_wrong_parts, parts)) for name, parts in files)
    return [problem for problems in checked for problem in problems]


def _records(path: Path) -> tuple[dict[str, FileRecord], list[Problem]]:
    """Return the files of a checkpoint, and the problem of its manifest, if it has one."""
    try:
        return read_manifest(path), []
    except (OSError, ValueError) as error:
        place = str(path / MANIFEST)
        return {}, [Problem(place, _reason(error), "the manifest that was saved", _HINT)]


def _by_size(records: Records, below: tuple[str, ...]) -> list[str]:
    """List the files whose paths begin with one of `below`, the largest first."""
    names = (name for name in records if name.startswith(below))
    return sorted(names, key=lambda name: (-records[name].size, name))


Wrong = tuple[str, str] | None
"""The fault of a file, actual and expected; None for a good one."""


def _problems(path: Path, name: str, check: Callable[[Path], Wrong]) -> list[Problem]:
    """List what `check` of a file of the checkpoint at `path` returns or raises."""
    hint = HINT_OPTIMIZER if name.startswith("optimizer/") else _HINT
    place = _shown(path / name)
    try:
        fault = check(path / name)
    except DiskError as error:
        return [replace(problem, hint=hint) for problem in error.problems]
    except (OSError, ValueError) as error:
        return [Problem(place, _reason(error), "a file that can be read", hint)]
    return [Problem(place, *fault, hint)] if fault else []


def _wrong_file(
    record: FileRecord, wrong: Callable[[FileRecord, Path], Wrong], file: Path
) -> Wrong:
    if fault := wrong(record, file):
        return fault
    if file.name == DESCRIPTION:
        read_description(file.parent)
    elif file.suffix == ".safetensors":
        read_header(file)
    return None


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _shown(path: Path) -> str:
    """Show a path readably, whatever a damaged manifest made of it."""
    return f"{str(path).encode(errors='backslashreplace').decode():.500}"


def hash_file(path: Path) -> FileRecord:
    """Return the size and SHA-256 of a file. Raises OSError, also if it is not a regular file."""
    check_regular(path)
    size = path.stat().st_size
    return FileRecord.whole(size, hash_part(path, span(0, size), "sha256"))


def hash_part(path: Path, place: Span, kind: str) -> str:
    """Return the digest of a part of a file; `kind`: sha256 or blake3.

    Raises OSError, and as `new_hash` does.
    """
    content = new_hash(kind)
    with path.open("rb", buffering=0) as file:
        for start, end in place.runs(1 << 20):
            content.update(os.pread(file.fileno(), end - start, start))
    return digest_of(content)


def _wrong_size(record: FileRecord, file: Path) -> Wrong:
    check_regular(file)
    count = file.stat().st_size
    return None if count == record.size else (f"{count} bytes", f"{record.size} bytes")


def _wrong_content(record: FileRecord, file: Path) -> Wrong:
    return _wrong_size(record, file) or _wrong_parts(record.parts, file)


def _wrong_parts(parts: Sequence[Hashed], file: Path) -> Wrong:
    whole = is_whole(parts, file.stat().st_size)
    for place, wanted in parts:
        if (digest := hash_part(file, place, kind_of(wanted))) != wanted:
            which = "" if whole else f" of bytes {place.start} to {place.end}"
            return f"{shown(digest)}{which}", shown(wanted)
    return None
