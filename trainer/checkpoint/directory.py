"""The checkpoints of a run beside each other: their names, the newest good one, and which may go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from trainer.checkpoint import faults
from trainer.checkpoint.manifest import ALL, check_sizes, read_description, verify
from trainer.distributed.ranks import ALONE, Ranks
from trainer.errors import DiskError, Problem, shared
from trainer.storage import disk_errors, rename_folder, replace_file

PARTIAL, DELETING, DAMAGED = ".partial", ".deleting", ".damaged"
LATEST = "latest"
_STEP = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(rf"step-\d{{6,}}({re.escape(PARTIAL)}|{re.escape(DELETING)})")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def published(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that are visible, oldest first; whether they are good is not looked at."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest(folder: Path, ranks: Ranks = ALONE, below: tuple[str, ...] = ALL) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and what to tell of each newer one, which is set aside. Collective.

    `below` is as for `verify`. Raises DiskError where the ranks do not see the same folder, or it can't be written.
    """
    damaged: list[tuple[Path, Path, list[Problem]]] = []
    found = None
    for path in reversed(ranks.on_first(lambda: published(folder))):
        _seen_by_all(path, ranks)
        problems = verify(path, ranks, below)
        if not problems:
            found = path
            break
        damaged.append((path, ranks.on_first(partial(_out_of_the_way, path)), problems))
    return found, [_told(path, aside, problems, found) for path, aside, problems in damaged]


def leftovers(folder: Path) -> list[Path]:
    """What runs that died, and damage, left beside the checkpoints."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and not _STEP.fullmatch(path.name))


def _told(path: Path, aside: Path, problems: list[Problem], found: Path | None) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    cost = step_of(path) - (step_of(found) if found else 0)
    fault = replace(problems[0], mend="")
    return f"{path.name} is damaged: {fault}{more}; it is now {aside.name}, and {cost} steps are lost"


def _seen_by_all(path: Path, ranks: Ranks) -> None:
    if missing := [rank for rank, there in enumerate(ranks.gather(path.is_dir())) if not there]:
        seen, expected = f"not there for rank {missing[0]}", "a folder that all machines share"
        raise shared(DiskError(Problem(str(path), seen, expected, "Put trainer.run.folder on a shared file system")))


def _out_of_the_way(path: Path) -> Path:
    """Rename a damaged checkpoint, for a person to look at: nothing here ever removes it."""
    names = (path.with_name(f"{path.name}{DAMAGED}{f'-{number}' if number > 1 else ''}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    with disk_errors(path):
        rename_folder(path, aside)
    return aside


def prune(folder: Path, keep_last: int, keep_best: bool = False) -> list[Path]:
    """Remove all but the last `keep_last` checkpoints, and the one of the lowest held-out loss if it is to be kept.

    At least one stays whose files are all there. On one rank; returns the removed. Raises DiskError.
    """
    directory = published(folder)
    stay = set(directory[-max(keep_last, 1) :]) | {path for path in [_best(directory)] if path and keep_best}
    whole = (path for path in sorted(stay, key=step_of)[::-1] + directory[::-1] if not check_sizes(path))
    stay |= {path for path in [next(whole, None)] if path}
    gone = [path for path in directory if path not in stay]
    for path in gone:
        with disk_errors(path):
            aside = set_aside(path)
            faults.at("prune")
            shutil.rmtree(aside)
    return gone


def _best(directory: Sequence[Path]) -> Path | None:
    losses: dict[Path, float] = {}
    for path in directory:
        with suppress(DiskError):  # a damaged one is not the best
            if (loss := read_description(path).get("evaluation_loss")) is not None:
                losses[path] = loss
    return min(losses, key=lambda path: losses[path], default=None)


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


def step_of(path: Path) -> int:
    """The step of a published checkpoint, from its name."""
    found = _STEP.fullmatch(path.name)
    assert found
    return int(found[1])
