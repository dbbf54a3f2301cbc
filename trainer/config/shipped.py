"""The configs that come with Meshloom, which are found by name."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "ds_configs", _PACKAGE.parent / "ds_configs")
"""Their folder in a wheel, and in a checkout."""


def shipped(name: str) -> Path | None:
    """Return the shipped config called `name`, with or without its ".json"; None if there is none."""
    return _paths().get(name.removesuffix(".json"))


def shipped_names() -> list[str]:
    return sorted(_paths())


def _paths() -> dict[str, Path]:
    folder = next(filter(Path.is_dir, _FOLDERS), _FOLDERS[0])
    return {path.stem: path for path in folder.glob("*.json")}
