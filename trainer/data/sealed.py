"""Folders whose every byte is known: hashed when written, compared when opened, a part first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trainer.storage import flush, write_file

SEAL = "seal.json"
_CHUNK = 1 << 26
_READ = 1 << 20
"""Bytes that one thread hashes as one chunk, and bytes that it reads at once."""
_THREADS = 8
LOOKED_AT = 16
MOST_FILES = 64
"""The chunks that a start reads, and the files of which it reads the first one, too, at most."""
Block = tuple[str, int]
"""The name of a file, and the number of a chunk of it."""
Report = Callable[[int, int], object]
"""Called with the number of bytes read, and of all bytes."""


def seal(folder: Path, progress: Report = lambda done, all: None) -> None:
    """Flush `folder` to the disk, and write its sizes, times and hashes there. Raises OSError."""
    files = _files(folder)
    for path in (*files.values(), *(path for path in folder.rglob("*") if path.is_dir())):
        flush(path)
    digests: dict[str, list[str]] = {name: [] for name in files}
    for (name, _), digest in _digests(files, _chunks(_sizes(files)), progress):
        digests[name].append(digest)
    known = {"sizes": _sizes(files), "times": _times(files), "sha256": digests}
    content = json.dumps(known, indent=1)
    write_file(folder / SEAL, f"{content}\n{checked(content)}\n".encode())
    flush(folder)


def flaw(folder: Path, progress: Report = lambda done, all: None, rest: bool = False) -> str:
    """Describe the first difference from the sealed state, for the user; empty if there is none.

    Reads a part (LOOKED_AT), or all if a file has another time than the sealed one; with `rest`,
    the chunks that the part leaves out, in one thread. Raises PermissionError if this user may not
    read the folder.
    """
    if not folder.is_dir():
        return "it is no folder"
    try:
        text = (folder / SEAL).read_text(encoding="utf-8")
        content, _, check = text.rstrip("\n").rpartition("\n")
        if check != checked(content):
            return f"{SEAL} is not as it was written"
        known = json.loads(content)
        files = _files(folder)
        if differing := known["sizes"].items() ^ _sizes(files).items():
            return f"{min(differing)[0]} no longer has the size that it was written with"
        chunks = _chunks(known["sizes"])
        if rest or known.get("times") == _times(files):
            first = _looked_at_first(chunks)
            chunks = [chunk for chunk in chunks if (chunk not in first) == rest]
        for (name, number), digest in _digests(files, chunks, progress, 1 if rest else _THREADS):
            if digest != known["sha256"][name][number]:
                return f"the bytes of {name} are not those that were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except PermissionError:
        raise
    # a failing disk, or damaged bytes
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return str(error)
    return ""


def _looked_at_first(chunks: Sequence[Block]) -> set[Block]:
    """Return the chunks that a start reads: the first of files, and some, evenly spaced."""
    spaced = {chunks[i * len(chunks) // LOOKED_AT] for i in range(LOOKED_AT if chunks else 0)}
    first = [chunk for chunk in chunks if chunk[1] == 0]
    return spaced | set(first[:: 1 + len(first) // MOST_FILES])


def stamp(folder: Path) -> tuple[int, int] | None:
    """Return a mark of this very folder, not of one on another disk or made later, or None."""
    with suppress(OSError):
        stat = (folder / SEAL).stat()
        return stat.st_ino, stat.st_mtime_ns
    return None


def checked(content: str) -> str:
    """Return the hash that is stored beside a small text, to tell if it is whole."""
    return hashlib.sha256(content.encode()).hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """List the files below a folder by path, without a file server's, which begin with a dot."""
    shown = [path for path in sorted(folder.rglob("*")) if not path.name.startswith(".")]
    files = {path.relative_to(folder).as_posix(): path for path in shown if not path.is_dir()}
    return {name: path for name, path in files.items() if name != SEAL}


def _sizes(files: Mapping[str, Path]) -> dict[str, int]:
    return {name: path.stat().st_size for name, path in files.items()}


def _times(files: Mapping[str, Path]) -> dict[str, int]:
    return {name: path.stat().st_mtime_ns for name, path in files.items()}


def _chunks(sizes: Mapping[str, int]) -> list[Block]:
    return [(name, number) for name, size in sizes.items() for number in range(-(-size // _CHUNK))]


def _digests(
    files: Mapping[str, Path], chunks: Sequence[Block], progress: Report, threads: int = _THREADS
) -> Iterator[tuple[Block, str]]:
    """Yield each chunk with its SHA-256, in order."""
    sizes = _sizes(files)
    lengths = [min(_CHUNK, sizes[name] - number * _CHUNK) for name, number in chunks]
    with ThreadPoolExecutor(threads) as pool:
        apply = pool.map if threads > 1 else map  # a pool would read on after an early end
        digests = apply(lambda chunk: _hash(files[chunk[0]], chunk[1] * _CHUNK), chunks)
        done = 0
        all = sum(lengths)
        for chunk, length, digest in zip(chunks, lengths, digests, strict=True):
            yield chunk, digest
            done += length
            progress(done, all)


def _hash(path: Path, at: int) -> str:
    digest = hashlib.sha256()
    left = _CHUNK
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        while left and (part := file.read(min(left, _READ))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()
