"""Folders whose every byte is known: sealed when written, checked when found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.storage import flush, write_file

SEAL = "seal.json"
_CHUNK, _READ = 1 << 26, 1 << 20
"""Bytes that one thread hashes as one chunk, and bytes that it reads at once."""
_THREADS = 8
Report = Callable[[int, int], object]
"""Called with the number of bytes read, and of all bytes."""


def seal(folder: Path, progress: Report = lambda done, all: None) -> None:
    """Flush all of `folder` to the disk, and write its sizes and hashes into it. Raises OSError."""
    files = _files(folder)
    for path in (*files.values(), *(path for path in folder.rglob("*") if path.is_dir())):
        flush(path)
    content = json.dumps({"sizes": _sizes(files), "sha256": _hashes(files, progress)}, indent=1)
    write_file(folder / SEAL, f"{content}\n{checked(content)}\n".encode())
    flush(folder)


def flaw(folder: Path, progress: Report = lambda done, all: None) -> str:
    """Describe the first difference from the sealed state, for the user; empty if there is none. Reads every byte.

    Raises PermissionError if this user may not read the folder.
    """
    if not folder.is_dir():
        return "it is no folder"
    try:
        content, _, check = (folder / SEAL).read_text(encoding="utf-8").rstrip("\n").rpartition("\n")
        if check != checked(content):
            return f"{SEAL} is not as it was written"
        known, files = json.loads(content), _files(folder)
        if differing := known["sizes"].items() ^ _sizes(files).items():
            return f"{min(differing)[0]} is not of the size that it had"
        hashes = _hashes(files, progress)
        differing = [name for name, found in hashes.items() if found != known["sha256"][name]]
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # a failing disk, or damaged bytes
        return str(error)
    return f"the bytes of {differing[0]} are not those that were written" if differing else ""


def checked(content: str) -> str:
    """Return the hash that is stored beside a small text, to tell if it is whole."""
    return hashlib.sha256(content.encode()).hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """List the files below a folder by path, without those that begin with a dot, which belong to file servers."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {name: path for name, path in found.items() if name != SEAL and not path.name.startswith(".")}


def _sizes(files: Mapping[str, Path]) -> dict[str, int]:
    return {name: path.stat().st_size for name, path in files.items()}


def _hashes(files: Mapping[str, Path], progress: Report) -> dict[str, list[str]]:
    """Return the SHA-256 of each chunk of each file."""
    sizes = _sizes(files)
    chunks = [(name, at) for name, size in sizes.items() for at in range(0, size, _CHUNK)]
    found: dict[str, list[str]] = {name: [] for name in files}
    done, all = 0, sum(sizes.values())
    with ThreadPoolExecutor(_THREADS) as pool:
        for (name, at), digest in zip(
            chunks, pool.map(lambda chunk: _hash(files[chunk[0]], chunk[1]), chunks), strict=True
        ):
            found[name].append(digest)
            done += min(_CHUNK, sizes[name] - at)
            progress(done, all)
    return found


def _hash(path: Path, at: int) -> str:
    found, left = hashlib.sha256(), _CHUNK
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        while left and (part := file.read(min(left, _READ))):
            found.update(part)
            left -= len(part)
    return found.hexdigest()
