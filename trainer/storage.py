"""Files and renames that reach the disk, and errors that say what to do if they can't."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, TextIO

from trainer.errors import ConfigError, DiskError, Problem, refused

Json = dict[str, Any]
"""A JSON object of a free form: who reads it checks what it takes."""

REFUSED_PICKLE = (
    "damaged, or a pickle that does more than hold tensors and plain values: it was not opened"
)
"""The text in place of PyTorch's, which advises to switch the protection off."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def installed(package: str) -> bool:
    """Return True if a package is installed: a folder of its name beside a script is none."""
    return getattr(find_spec(package), "origin", None) is not None


def imported(module: str, place: str) -> ModuleType:
    """Import a module of an installed package. Raises ConfigError with its reason if it fails."""
    package = module.partition(".")[0]
    expected = f"a {package} that can be imported"
    start = f"{package} is installed, but its import fails: "
    hint = f"Install one that fits your PyTorch, or uninstall it (pip uninstall {package})"
    # whatever a package built for another version raises
    with refused(place, expected, named=True, start=start, hint=hint):
        return import_module(module)


def required(module: str, place: str, brought_by: str) -> ModuleType:
    """Import a module of a package that may be missing. Raises ConfigError.

    `brought_by` is what to install: the package, or "meshloom[evaluate]" with our extra.
    """
    if not installed(package := module.partition(".")[0]):
        actual = f"{package} is not installed"
        hint = f"pip install {quote(brought_by)}"
        raise ConfigError(Problem(place, actual, f"the package {package}", hint))
    return imported(module, place)


def ensure_writable(folder: Path, needed_bytes: int = 0) -> None:
    """Create `folder`, write a small file there, and check that `needed_bytes` are free.

    Raises DiskError.
    """
    with disk_errors(folder, needed_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"  # one name: a probe that a kill leaves goes with the next one
        probe.write_bytes(b"0" * 512)
        probe.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        actual = f"{size(free)} free"
        expected = f"at least {size(needed_bytes)} free"
        hint = "Free space there, or choose another folder"
        raise DiskError(Problem(str(folder), actual, expected, hint))


def check_new(folder: Path) -> None:
    """Raise ConfigError unless a folder that is to be written is not there yet, or empty."""
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not empty:
        raise ConfigError(Problem(str(folder), "it is there already", "a new or an empty folder"))


@contextmanager
def disk_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError inside into a DiskError with the place, and what is free and needed there."""
    try:
        yield
    except OSError as error:
        actual = f"{error.strerror or error}, {_free(path)} free"
        wanted = f"takes {size(needed_bytes)}" if needed_bytes else "can be written"
        hint = "Free space there, or change its permissions"
        raise DiskError(Problem(str(path), actual, f"a place that {wanted}", hint)) from error


def size(count: int) -> str:
    """Return `count` bytes as text for the user."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def to_json(value: object) -> bytes:
    """Return a value as a checkpoint's JSON files have it. Raises TypeError, ValueError."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def parse_json(content: bytes | str) -> Any:
    """Parse JSON text from any source. Raises ValueError, whatever is wrong with it."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        if "int_max_str_digits" in str(error):  # Python's words advise to switch its limit off
            raise ValueError("a whole number of more than 4,300 digits") from None
        raise


def check_regular(path: Path) -> None:
    """Raise OSError for anything but a regular file, such as a pipe, whose opening would hang."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))


def read_file(path: Path, most: int = 1 << 26) -> bytes:
    """Return a regular file's bytes. Raises OSError, also if there are more than `most`."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {size(most)}", str(path))
    return content


def json_in(path: Path) -> Any:
    """Return the content of a JSON file; None if there is no such file, or it can't be read."""
    with suppress(OSError, ValueError):
        return parse_json(read_file(path))
    return None


def opened_at_once(path: str, flags: int) -> int:
    """Open a file, for `open`, without waiting for a pipe's reader. Raises OSError."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def tail(path: Path, most: int = 1 << 20) -> bytes:
    """Return the last bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read(most)


def write_file(path: Path, content: bytes) -> None:
    """Write `path` and flush it to the disk."""
    path.write_bytes(content)
    flush(path)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of `path`: a reader sees the old or the new one, never a part."""
    beside = path.with_name(f".{path.name}.new")
    write_file(beside, content)
    os.replace(beside, path)
    flush(path.parent)


def publish_json(path: Path, value: object) -> None:
    """Replace a JSON file at once for its readers, unflushed: it is of no use after a crash."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value))
    beside.replace(path)


def rename_folder(old: Path, new: Path) -> None:
    """Rename in one atomic step, and flush the folder that holds both."""
    os.rename(old, new)
    flush(new.parent)


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free(path: Path) -> str:
    existing = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    return size(shutil.disk_usage(existing).free)


def private_folder() -> Path:
    """Return this user's folder for temporary files. Raises PermissionError if another owns it."""
    folder = Path(tempfile.gettempdir(), f"meshloom-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, f"{folder} is not this user's own", str(folder))
    return folder


class Unfailing:
    """A text file for people that never fails: text that it does not take is lost.

    A full disk may be the reason, or a reader that is gone. `failed` is called with the first such
    error. Later text may be written again.
    """

    def __init__(
        self, file: TextIO, failed: Callable[[OSError], object] = lambda error: None
    ) -> None:
        self._file = file
        self._failed = failed
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if self.lost is None:
                self.lost = error
                self._failed(error)
