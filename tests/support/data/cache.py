"""What a cache has in its files."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    results = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {
        name: content for name, content in results.items() if name != "seal.json"
    }  # it has times
