"""A run's folder: its name, its lock, and the machines that see the same one."""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint import published, strangers
from trainer.checkpoint.copies.upload import identity
from trainer.checkpoint.manifest import MANIFEST, WEIGHTS_ALONE, check_sizes
from trainer.checkpoint.slots import MODEL
from trainer.config import Config
from trainer.config.sections.trainer import HubSection
from trainer.distributed.ranks import Ranks
from trainer.errors import DiskError, HubError, Problem, listed
from trainer.storage import (
    disk_errors,
    ensure_writable,
    parse_json,
    read_file,
    replace_file,
    to_json,
)

FINAL = "final"
ENVIRONMENT = "environment.json"
PLAN = "plan.json"
"""The file with the memory that the planner predicted."""
PUSHED = "pushed.json"
"""The file that says which final model is in which repository of the Hub."""
PATIENCE_SECONDS = 10.0
"""Seconds until a network file system shows a machine what another one has written."""


def base_of(config: Config) -> Path:
    """Return the folder of the config's first run; those of later ones end in -2, -3, ..."""
    section = config.trainer.run
    return Path(section.folder) / (section.name or config.path.stem)


def numbered(base: Path, number: int) -> Path:
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def has_run(folder: Path) -> bool:
    """Return False for a run that failed its checks, too: it has written no config."""
    return (folder / "config.json").exists()


def is_unfinished(folder: Path) -> bool:
    """Return True without a final model, or if it is older than the last start."""
    final = folder / FINAL
    environment = folder / ENVIRONMENT
    if not final.exists() or not environment.exists():
        return not final.exists()
    return final.stat().st_mtime < environment.stat().st_mtime


def model_in(path: Path) -> Path:
    """Return the folder of a run's final model or newest whole checkpoint, or of a checkpoint's
    model; any other path as it is.

    Raises DiskError if files of a checkpoint are damaged.
    """
    folders = published(path) or published(path / "checkpoints")
    if not folders or not is_unfinished(path):
        is_run = (path / FINAL).is_dir() or (path / ENVIRONMENT).exists()
        folders = [path / FINAL if is_run else path]
    for one in reversed(folders):
        damage = []
        if (one / MANIFEST).exists():
            # a library would read weights that lie beside those of the manifest
            damage = check_sizes(one, WEIGHTS_ALONE) or strangers(one)[0]
        if not damage:
            return one / MODEL if (one / MODEL).is_dir() else one
    hint = f"meshloom checkpoint verify {one} names all that is damaged"
    raise DiskError(replace(damage[0], hint=hint))


def numbers(base: Path) -> list[int]:
    """List the numbers of all runs of that name on this machine."""
    ends = {path.name.removeprefix(f"{base.name}-") for path in base.parent.glob("*")}
    later = {int(end) for end in ends if end.isdecimal()}
    return [number for number in {1, *later} if has_run(numbered(base, number))]


def not_pushed(folder: Path, reason: str) -> HubError:
    """Build the error of a push to the Hub that failed, with which nothing is lost."""
    hint = f"Nothing is lost: `meshloom push {folder}` pushes {folder / FINAL}"
    return HubError(Problem("trainer.hub", reason, hint=hint))


def is_pushed(folder: Path, section: HubSection) -> bool:
    """Return True if the run's final model, as it is, is in the config's repository."""
    try:
        pushed = parse_json(read_file(folder / PUSHED))
        same = pushed["repository"] == section.repository
        return bool(
            same
            and pushed["model"] == identity(folder / FINAL)
            and pushed["checkpoints"] >= section.checkpoints
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def note_pushed(folder: Path, section: HubSection) -> None:
    """Note in the run's folder that the final model is in a repository. Raises DiskError."""
    own = {"repository": section.repository, "checkpoints": section.checkpoints}
    with disk_errors(folder / PUSHED):
        replace_file(folder / PUSHED, to_json({**own, "model": identity(folder / FINAL)}))


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Raise DiskError, naming the machines that see another `folder` than rank 0. Collective."""
    if ranks.world_size == 1:
        return
    mark = ranks.on_first(lambda: _leave_mark(folder))
    sees = _sees(folder / mark)
    blind = ranks.any(not sees)
    ranks.on_first(lambda: (folder / mark).unlink(missing_ok=True))
    if blind:
        answers = ranks.gather((socket.gethostname(), folder.absolute(), sees))
        unseen = ((i, host, at) for i, (host, at, sees) in enumerate(answers) if not sees)
        others = [f"rank {i} on {host} ({at})" for i, host, at in unseen]
        actual = f"what rank 0 on {answers[0][0]} writes there is not there for {listed(others)}"
        hint = (
            "Put trainer.run.folder on a file system that they share, as an absolute path, or set "
            "trainer.run.node_local: each machine then keeps all of the run in a folder of its own"
        )
        raise DiskError(Problem(str(folder), actual, "one folder for all machines", hint)).share()


def kept(folder: Path, ranks: Ranks) -> Ranks:
    """Return the ranks with the first of each `folder`, which some machines may share. Collective.

    Raises DiskError if it can't be written.
    """
    if ranks.world_size == 1:
        return ranks
    import torch.distributed as dist

    token = ranks.on_first(lambda: uuid.uuid4().hex)
    mark = folder / f".visible-{token}-{ranks.rank}"

    @disk_errors(folder)
    def leave() -> None:
        ensure_writable(folder)
        mark.touch()

    @disk_errors(folder)
    def look() -> int:
        return min(int(path.name.rpartition("-")[2]) for path in folder.glob(f".visible-{token}-*"))

    ranks.on_own(leave)
    node_firsts = tuple(ranks.on_each(look))
    with suppress(OSError):
        mark.unlink(missing_ok=True)
    if odd := [
        rank for rank, node_first in enumerate(node_firsts) if node_firsts[node_first] != node_first
    ]:
        node_first = node_firsts[odd[0]]
        actual = (
            f"what rank {odd[0]} sees is not what rank {node_first} sees, which is there for it"
        )
        expected = "folders that are the same for all who see them"
        raise DiskError(Problem(str(folder), actual, expected)).share()
    group = dist.new_group(sorted(set(node_firsts)), backend="gloo")
    return replace(ranks, node_firsts=node_firsts, among_node_firsts=group)


def _leave_mark(folder: Path) -> str:
    name = f".visible-{uuid.uuid4().hex}"
    with disk_errors(folder):
        (folder / name).touch()
    return name


def _sees(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(OSError):
            # a listing asks the server, which a look at the name may not
            if path.name in os.listdir(path.parent):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
