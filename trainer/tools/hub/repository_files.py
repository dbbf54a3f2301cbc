"""The files of a run that make a repository: its model, its card, and the checkpoints it keeps."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from trainer import checkpoint
from trainer.checkpoint.folders import PARTIAL, removed_on_error
from trainer.storage import disk_errors, ensure_writable, flush, rename_folder
from trainer.tools.hub.card import CARD, card_of

Files = Mapping[str, Path | bytes]
"""Paths in a repository, with "/" -> a file here, or a content."""


def files_of(
    folder: Path, repository: str, certificate: str | None = None, checkpoints: bool = False
) -> Files:
    """Return the files of the run in `folder` for the repository of that name.

    `certificate`: as for `card_of`; `checkpoints`: with those that the run keeps. Raises
    ConfigError as `card_of` does.
    """
    files: dict[str, Path | bytes] = {CARD: card_of(folder, repository, certificate)}
    files |= {path.name: path for path in (folder / "final").iterdir()}
    for path in checkpoint.published(folder / "checkpoints") if checkpoints else ():
        inner = (file for file in path.rglob("*") if file.is_file())
        files |= {str(file.relative_to(folder)): file for file in inner}
    return files


def write_folder(target: Path, files: Files) -> None:
    """Write the files to the folder `target`, which is new or empty: all of them, or no folder.

    Raises DiskError.
    """
    target = target.absolute()
    partial = target.with_name(target.name + PARTIAL)
    sizes = (one.stat().st_size if isinstance(one, Path) else len(one) for one in files.values())
    with removed_on_error(partial, True), disk_errors(partial):
        ensure_writable(partial.parent, sum(sizes))
        shutil.rmtree(partial, ignore_errors=True)
        for name, content in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, path)
            else:
                path.write_bytes(content)
            flush(path)
        rename_folder(partial, target)
