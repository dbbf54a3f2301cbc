"""The checkpoints of a run beside each other: their names, the newest good one, and which may go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from trainer.checkpoint import faults
from trainer.checkpoint.disk import disk_errors, rename_folder, replace_file
from trainer.checkpoint.manifest import check_sizes, verify

PARTIAL, DELETING = ".partial", ".deleting"
LATEST = "latest"
_STEP = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(rf"step-\d{{6,}}({re.escape(PARTIAL)}|{re.escape(DELETING)})")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def published(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that are visible, oldest first; whether they are good is not looked at."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step)


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and for each newer one why it was skipped. Not collective."""
    skipped: list[str] = []
    for path in reversed(published(folder)):
        if not (problems := verify(path)):
            return path, skipped
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        skipped.append(f"{path.name} is damaged: {problems[0]}{more}")
    return None, skipped


def prune(folder: Path, keep_last: int, keep: Collection[int] = ()) -> list[Path]:
    """Remove all but the last `keep_last` checkpoints and those of the steps `keep`; returns the removed. On one rank.

    At least one stays whose files are all there. Raises DiskError.
    """
    shelf = published(folder)
    stay = set(shelf[-max(keep_last, 1) :]) | {path for path in shelf if _step(path) in keep}
    whole = (path for path in sorted(stay, key=_step)[::-1] + shelf[::-1] if not check_sizes(path))
    stay |= {path for path in [next(whole, None)] if path}
    gone = [path for path in shelf if path not in stay]
    for path in gone:
        with disk_errors(path):
            aside = set_aside(path)
            faults.at("prune")
            shutil.rmtree(aside)
    return gone


def set_aside(path: Path) -> Path:
    """Take a folder out of sight in one step; returns what is left to remove."""
    aside = path.with_name(path.name + DELETING)
    shutil.rmtree(aside, ignore_errors=True)
    rename_folder(path, aside)
    return aside


def sweep(folder: Path) -> None:
    """Remove what a run that died left behind."""
    for path in folder.glob("step-*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def point_at(path: Path) -> None:
    """Name `path` in `latest`, a file for people and scripts: resuming looks at the folders themselves."""
    replace_file(path.parent / LATEST, f"{path.name}\n".encode())


def _step(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    assert found
    return int(found[1])
