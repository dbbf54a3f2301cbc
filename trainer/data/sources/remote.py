"""Data at addresses of fsspec, such as `s3://bucket/*.jsonl`: copied once, then read as local ones.

The copy of an address is a folder of the cache, named by a digest of what its file system knows of
each file: if one has changed, it is another copy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.cache import cached_folder
from trainer.data.progress import Progress
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, Problem, refused
from trainer.storage import ensure_writable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from trainer.config import DataSection

EXPECTED = "an address of fsspec with files that can be read, such as s3://bucket/*.jsonl"
HINT = "Correct the address or its credentials, or install the package of its file system"
_SHOWN_SECONDS = 1.0
VERSION = "size ETag etag blob_id generation LastModified last_modified mtime created"
"""The facts of a file, by the names of several file systems, that change with its content."""


class Listing(NamedTuple):
    """The files at an address: a file, those below a folder, or those of a glob."""

    address: str
    system: AbstractFileSystem
    files: dict[str, int | None]
    """The paths, and their bytes if they are known."""
    folder: str
    """The path of the folder, or nothing."""
    copy: str
    """The name of the copy."""

    def fetch(self, cache: Path, progress: Progress) -> list[str]:
        """Return the folder or the files in the copy, which is made if it is not there."""
        progress.begin(self.address)
        with closing(progress):
            copy = cached_folder(cache, self.copy, partial(self.write, progress=progress), progress)
        return [str(copy / _local(path)) for path in ([self.folder] if self.folder else self.files)]

    def write(self, folder: Path, progress: Progress) -> list[str]:
        """Copy the files to a folder, which may be missing; return their names there."""
        whole = sum(count or 0 for count in self.files.values())
        done = Event()
        places = [folder / _local(path) for path in self.files]

        def show() -> None:
            """Show the bytes on the disk: not every file system says what has come."""
            shown = 0
            while not done.wait(_SHOWN_SECONDS):
                here = sum(map(_bytes_on_disk, places))
                if here != shown:
                    shown = here
                    progress.say(f"copied {here / 1e6:,.0f} of {whole / 1e6:,.0f} MB")

        folder.mkdir(exist_ok=True)
        ensure_writable(folder, whole)
        with _reached(self.address):
            for parent in {place.parent for place in places}:
                parent.mkdir(parents=True, exist_ok=True)
            Thread(target=show, name="copied bytes", daemon=True).start()
            try:
                self.system.get([*self.files], [*map(str, places)])
            finally:
                done.set()
            for place, count in zip(places, self.files.values(), strict=True):
                if place.stat().st_size != (count or place.stat().st_size):
                    raise OSError(f"{place.stat().st_size} of {count} bytes came of {place.name}")
        return list(map(str, places))


def listing_of(address: str) -> Listing:
    """List the files at an address. Raises DataError if there are none, or no access."""
    import fsspec

    with _reached(address):
        system, root = fsspec.core.url_to_fs(address)
        system.invalidate_cache()
        is_glob = any(letter in root for letter in "*?[") and not system.isfile(root)
        listing = (system.glob if is_glob else system.find)(root, detail=True)
    folder = "" if is_glob or root in listing else root
    files = {}
    versions = []
    for path, about in sorted(listing.items()):
        if about["type"] == "file" and not (folder and "/." in path.removeprefix(root)):
            if os.path.normpath(_local(path)) != _local(path):  # it may lead out of the cache
                raise DataError(Problem(address, f"a file named {path!r}", "a plain path"))
            files[path] = about.get("size")
            versions.append((path, [about.get(key) for key in VERSION.split()]))
    if not files:
        raise DataError(Problem(address, "no file", EXPECTED, HINT))
    digest = hashlib.sha256(repr((address, versions)).encode()).hexdigest()[:32]
    return Listing(address, system, files, folder, f"remote-{digest}")


def fetched(data: DataSection, cache: Path, ranks: Ranks, progress: Progress) -> DataSection:
    """Copy what has an address once to each machine; return the section with local names.

    Collective; raises the same DataError (the address) or DiskError (the cache) on every rank.
    """

    def copies() -> dict[str, list[str]]:
        return {one: listing_of(one).fetch(cache, progress) for one in addresses(data)}

    if not addresses(data):
        return data
    places = ranks.await_first(copies)
    if ranks.any(not all(map(os.path.exists, sum(places.values(), [])))):
        ranks.await_each(lambda: places.update(copies()))  # machines with a cache of their own
    return _localised(data, places.__getitem__)


def addresses(data: DataSection) -> list[str]:
    addresses_of: dict[str, list[str]] = {}
    _localised(data, lambda name: addresses_of.setdefault(name, []))
    return list(addresses_of)


def absent(data: DataSection, cache: Path) -> list[str]:
    """Name the addresses that would be copied first. Raises DataError."""
    away = [one for one in map(listing_of, addresses(data)) if not (cache / one.copy).exists()]
    return [f"{one.address} ({len(one.files):,} files)" for one in away]


def _localised(data: DataSection, names: Callable[[str], list[str]]) -> DataSection:
    """Return the section with local names in place of each address."""

    def local(value: Any) -> Any:
        if "://" not in str(value):
            return value
        if isinstance(value, dict):
            return {key: local(one) for key, one in value.items()}
        each = [value] if isinstance(value, str) else value
        paths = [name for one in each for name in (names(one) if "://" in one else [one])]
        return paths[0] if isinstance(value, str) and len(paths) == 1 else paths

    sources = [
        one.model_copy(update={"path": local(one.path), "label": one.label or str(one.path)})
        for one in data.sources
    ]
    keys = ["evaluation_path", "tokenizer", "chat_template"]
    keys += [] if data.stream else ["path"]  # a stream's files are copied one by one
    own = {key: local(getattr(data, key)) for key in keys}
    return data.model_copy(update={**own, "sources": sources})


def _bytes_on_disk(path: Path) -> int:
    with suppress(FileNotFoundError):  # not begun, or just replaced
        return path.stat().st_blocks * 512
    return 0


def _local(path: str) -> str:
    return path.rpartition("://")[2].lstrip("/")


def _reached(address: str) -> AbstractContextManager[None]:
    return refused(address, EXPECTED, named=True, hint=HINT, raises=DataError)
