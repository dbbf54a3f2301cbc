"""Folders that are made once, appear whole or not at all, and are only read afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.errors import DiskError, Problem


def cached_folder(cache: Path, name: str, write: Callable[[Path], object]) -> Path:
    """The folder `cache / name`; if there is none, `write(folder)` fills one that is then renamed to it.

    Whoever dies while writing leaves no folder of that name; two who write at once both get a whole one.
    Raises DiskError if the cache can't be written; what `write` raises goes through.
    """
    final = cache / name
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache, prefix=".partial-") as temporary:
            partial = Path(temporary, name)
            partial.mkdir()
            write(partial)
            _publish(partial, final)
    except OSError as error:
        seen = f"{error.strerror or error}"
        mend = "Free space there, or mend its permissions"
        raise DiskError(Problem(str(cache), seen, "a cache folder that can be written", mend)) from error
    return final


def _publish(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir():  # else another process was faster, with the same content
            raise
