"""The default data: the sources of Python's standard library, which are on every machine."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MAX_CHARACTERS = 8_000_000
_PACKAGES = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages", "dist-packages"}
_TABLES = {"encodings"}  # character tables: long, and nothing to learn in them


def name() -> str:
    """Name the text, e.g. `cpython-3.12.3`: it changes only with Python's version."""
    return f"{platform.python_implementation().lower()}-{platform.python_version()}"


def documents() -> Iterator[str]:
    """Yield the sources in the order of their names, up to `MAX_CHARACTERS` in all."""
    left = MAX_CHARACTERS
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        left -= len(text)
        if left < 0:
            return
        if text.strip():
            yield text


def _sources(root: Path) -> list[Path]:
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _PACKAGES | _TABLES]
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    # _sysconfigdata has paths of the machine that built this Python
    return sorted(path for path in paths if not path.name.startswith("_sysconfigdata"))
