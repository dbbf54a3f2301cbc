"""The checkpoints of a run: their names, the newest good one, and those to remove."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from trainer.checkpoint import faults, manifest
from trainer.checkpoint.folders import PARTIAL, supply
from trainer.checkpoint.manifest import ALL, MANIFEST, STEP_FOLDER
from trainer.distributed.ranks import ALONE, Ranks
from trainer.errors import DiskError, Problem, listed
from trainer.storage import disk_errors, rename_folder

DELETING = ".deleting"
DAMAGED = ".damaged"
LATEST = "latest"
"""The file with the newest checkpoint's name, for users and scripts: resuming does not read it."""
_LEFTOVER = re.compile(rf"step-\d{{6,}}({re.escape(PARTIAL)}|{re.escape(DELETING)})")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def published(folder: Path) -> list[Path]:
    """List the published checkpoints in `folder`, oldest first, without checking them."""
    named = (path for path in folder.glob("step-*") if STEP_FOLDER.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=step_of)


def newest(
    folder: Path, ranks: Ranks = ALONE, below: tuple[str, ...] = ALL
) -> tuple[Path | None, list[str]]:
    """Return the newest good checkpoint, or None, and lines for the user. Collective.

    Newer ones are damaged: they are renamed, and a line describes the damage of each. `below` is
    as for `verify`. If machines have folders of their own, a checkpoint that is good in any of them
    is copied to those where it is not. Raises DiskError if ranks of a machine do not see the same
    folder, machines have different checkpoints of one step, or a folder can't be written; and
    ConfigError as `verify_each` does.
    """
    damaged: list[tuple[Path, Path, list[Problem]]] = []
    newest = None
    copied = []
    for path in _published_anywhere(folder, ranks):
        there = ranks.gather(path.is_dir())
        _differing_beside(path, there, ranks)
        wrong = manifest.verify_each(path, ranks, below)
        bad = [
            node_first for node_first, problems in wrong.items() if problems and there[node_first]
        ]
        aside = ranks.on_each(partial(out_of_the_way if ranks.rank in bad else Path, path))
        damaged += [(path, aside[node_first], wrong[node_first]) for node_first in bad]
        if good := [rank for rank, problems in wrong.items() if not problems]:
            newest = path
            check_same(path, good, ranks)
            if lacking := [rank for rank in wrong if rank not in good]:
                supply(path, good[0], ranks.node_first in lacking, ranks)
                to = listed([f"rank {rank}" for rank in lacking])
                copied = [f"{path.name} was copied from rank {good[0]} to {to}"]
            break
    return newest, [*(_damage(*one, newest) for one in damaged), *copied]


def _published_anywhere(folder: Path, ranks: Ranks) -> list[Path]:
    """List the checkpoints that any run folder has, newest first. Collective."""
    of_folders = ranks.each_node_first(lambda: published(folder)).values()
    names = {path.name for paths in of_folders for path in paths}
    return sorted((folder / name for name in names), key=step_of, reverse=True)


def leftovers(folder: Path) -> list[Path]:
    """List the folders beside the checkpoints: unfinished ones of killed runs, and damaged ones."""
    others = (path for path in folder.glob("step-*") if not STEP_FOLDER.fullmatch(path.name))
    return sorted(path for path in others if path.is_dir())


def _damage(path: Path, aside: Path, problems: list[Problem], good: Path | None) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    cost = step_of(path) - (step_of(good) if good else 0)
    fault = f"{path.name} is damaged: {replace(problems[0], hint='')}{more}"
    return f"{fault}; it is now {aside.name}, and {cost} steps are lost"


def _differing_beside(path: Path, there: Sequence[bool], ranks: Ranks) -> None:
    """Raise DiskError if a rank does not see the same files as its node's first rank."""
    node_firsts = ranks.node_firsts or (0,) * ranks.world_size
    blind = [
        rank for rank, node_first in enumerate(node_firsts) if there[node_first] and not there[rank]
    ]
    if blind:
        actual = f"not there for rank {blind[0]}"
        expected = "a folder that all machines share"
        hint = "Put trainer.run.folder on a shared file system"
        raise DiskError(Problem(str(path), actual, expected, hint)).share()


def check_same(path: Path, node_firsts: Sequence[int], ranks: Ranks) -> None:
    """Raise DiskError if several folders have different checkpoints under one name. Collective."""
    wanted = len(node_firsts) > 1 and ranks.rank in node_firsts
    contents = ranks.on_each(lambda: (path / MANIFEST).read_bytes() if wanted else None)
    if other := [rank for rank in node_firsts if contents[rank] != contents[node_firsts[0]]]:
        actual = f"rank {other[0]} has another checkpoint than rank {node_firsts[0]}; both are good"
        hint = "Move away the one that is not of this run"
        raise DiskError(Problem(str(path), actual, "copies of one checkpoint", hint)).share()


def out_of_the_way(path: Path) -> Path:
    """Rename a damaged checkpoint, and return its new path. Raises DiskError.

    It is left for the user to inspect: nothing here ever removes it.
    """
    endings = (f"-{number}" if number > 1 else "" for number in count(1))
    names = (path.with_name(f"{path.name}{DAMAGED}{ending}") for ending in endings)
    aside = next(name for name in names if not name.exists())
    with disk_errors(path):
        rename_folder(path, aside)
    return aside


def prune(
    folder: Path, keep_last: int, keep_best: bool = False, kept: Sequence[Path] = ()
) -> list[Path]:
    """Remove all but the last `keep_last` checkpoints and, if `keep_best`, that of the lowest loss.

    The loss is the held-out one. The paths in `kept` stay, too, and at least one checkpoint that
    has all its files. To be called on one rank. Returns the removed paths. Raises DiskError.
    """
    directory = published(folder)
    stay = {*directory[-max(keep_last, 1) :], *kept}
    if keep_best and (best := _best(directory)):
        stay.add(best)
    by_preference = [*sorted(stay, key=step_of, reverse=True), *reversed(directory)]
    if whole := next((path for path in by_preference if not manifest.check_sizes(path)), None):
        stay.add(whole)
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
            if (loss := manifest.read_description(path).get("evaluation_loss")) is not None:
                losses[path] = loss
    return min(losses, key=lambda path: losses[path], default=None)


def set_aside(path: Path) -> Path:
    """Rename a folder that is to be removed, and return the new path. Raises OSError."""
    aside = path.with_name(path.name + DELETING)
    shutil.rmtree(aside, ignore_errors=True)
    rename_folder(path, aside)
    return aside


def sweep(folder: Path) -> None:
    """Remove the unfinished folders that a killed run left behind. Raises OSError."""
    for path in folder.glob("step-*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def step_of(path: Path) -> int:
    """Return the step of a published checkpoint, from its name."""
    match = STEP_FOLDER.fullmatch(path.name)
    assert match
    return int(match[1])
