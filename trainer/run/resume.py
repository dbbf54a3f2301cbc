"""The choice of a run's folder and of the checkpoint to resume from, and the checks that allow
it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer import checkpoint
from trainer.config import Config, leaves
from trainer.distributed.ranks import ALONE, Ranks
from trainer.engines import Machine
from trainer.errors import ConfigError, DataError, DiskError, Problem, in_python, listed, shared
from trainer.run.prepare import Prepared
from trainer.run.shared import check_shared, kept
from trainer.storage import parse_json, read_file, tail
from trainer.supervise import status_files as status

FINAL, LOCK, ENVIRONMENT = "final", ".lock", "environment.json"
HELD_SECONDS = 10.0
BESIDE = {
    "": (
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "flops_profiler",
        "comms_logger",
    ),
    "trainer": ("log", "checkpoint", "generate", "patience", "plan", "profile"),
}
"""Keys that may differ within one run: they only decide what is reported and kept of it."""


MemoryCheck = Callable[[Prepared, Machine, Path, Console], Callable[[], Sequence[str]]]
"""Raises ConfigError if a run does not fit; what it returns compares at the end. Collective."""


@dataclass(frozen=True)
class Request:
    """The options of the command line besides the config, and its check of memory."""

    resume: str | None = None
    """A checkpoint's path, or "auto" for the newest one of the newest run of that name, whatever
    its config.
    """
    fresh: bool = False
    """True to start a new run even if the last one was not finished."""
    resume_anyway: bool = False
    """True to resume even if data, tokenizer, model or code changed."""
    weights_only: bool = False
    """True to resume with a new optimizer."""
    dry_run: bool = False
    preview: int | None = None
    """The number of samples to show, without training; None to train."""
    overrides: Sequence[str] = ()
    script: bool = False
    """True if called from Python: a finished run is then repeated, in another folder."""
    memory_check: MemoryCheck = lambda *_: list


@dataclass(frozen=True)
class Start:
    """The folder of a run, and the checkpoint it resumes from."""

    folder: Path
    source: Path | None = None
    """The checkpoint, complete and verified; None: from the beginning."""
    lines: list[str] = field(default_factory=list)
    """Lines for the user."""
    finished: bool = False
    """True if nothing is left to do."""
    ranks: Ranks = ALONE
    """The ranks, with the keepers of folders."""


def choose(config: Config, request: Request, ranks: Ranks) -> Start:
    """Choose where a run begins or resumes, by `_chosen`; its earlier end is forgotten.
    Collective.
    """
    if config.trainer.run.node_local:
        ranks = kept(Path(config.trainer.run.folder), ranks)
    start = _chosen(config, request, ranks)
    if not start.finished:
        ranks.on_keepers(lambda: status.begin(start.folder))
    return replace(
        start,
        ranks=ranks,
        lines=[in_python(line) if request.script else line for line in start.lines],
    )


def _chosen(config: Config, request: Request, ranks: Ranks) -> Start:
    """Choose the folder `runs/NAME`, or the first free of NAME-2, NAME-3, ..., and the checkpoint.
    Collective.

    The same command again resumes a run that was not finished, and reports another one as finished.
    The folder is locked until this process ends. Raises ConfigError for a path that is no
    checkpoint and for a run in progress, and DiskError if the folder can't be written, or
    checkpoints were saved and none is good.
    """
    if len(set(ranks.keepers)) > 1:
        folder, state, lines = _held_by_each(config, request, ranks)
    else:
        folder, state, lines = ranks.on_first(lambda: _held(config, request))
        if state != "finished":
            check_shared(folder, ranks)
    if state == "finished":
        return Start(folder, finished=True)
    below = checkpoint.WEIGHTS_ALONE if request.weights_only else checkpoint.ALL
    if request.resume not in (None, "auto"):
        given = ranks.on_keepers(lambda: _checkpoint(Path(str(request.resume))))
        problems = checkpoint.verify(given, ranks, below)
        ranks.on_first(lambda: _refuse(problems))
        checkpoint.check_same(given, sorted(set(ranks.keepers)), ranks)
        return Start(folder, given, lines)
    if state == "begins":
        return Start(folder, None, lines)
    directory = folder / "checkpoints"
    source, damaged = checkpoint.newest(directory, ranks, below)
    kept_beside = ranks.each_keeper(lambda: checkpoint.leftovers(directory)).values()
    left = sorted({path.name for paths in kept_beside for path in paths})
    lines = [*damaged, *([f"left over in {directory}: {', '.join(left)}"] if left else [])]
    if source is None and any(checkpoint.DAMAGED in name for name in left):
        mend = "Mend one and give its path to --resume, or start a run of its own with --fresh"
        problem = Problem(str(directory), "; ".join(lines), "a checkpoint that is good", mend)
        ranks.on_first(lambda: _refuse([problem]))
    reached = ranks.on_first(lambda: _last_logged(folder / "metrics.jsonl"))
    step = checkpoint.step_of(source) if source else 0
    if reached > step:
        lines.append(
            f"steps {step + 1} to {reached} came after the last good checkpoint and are made again"
        )
    return Start(folder, source, lines)


def refuse_changed(source: Path, description: Mapping[str, Any]) -> list[str]:
    """List other changes since the checkpoint, a line each; an imported one does not record data
    and config.

    Raises DataError if data or tokenizer changed, ConfigError if the model or its code did: it
    would not be the same run.
    """
    saved = checkpoint.read_description(source)
    mend = (
        "Undo the change, start a run of its own with --fresh, or go on in spite of it with "
        "--resume-anyway"
    )
    data = _differences(saved.get("data", description["data"]), description["data"])
    if data:
        expected = "what the checkpoint was made with"
        raise DataError(Problem(f"data or tokenizer: {source}", listed(data), expected, mend))
    before, now = saved.get("model") or description["model"], description["model"]
    if "base" in before and "base" in now and before["base"] != now["base"]:
        seen, expected = (
            f"fingerprint {now['base'][:12]}...",
            f"the base of the adapter, {before['base'][:12]}...",
        )
        raise ConfigError(Problem(f"trainer.model.name_or_path: {source}", seen, expected, mend))
    model = _differences(before, now)
    if model:
        raise ConfigError(
            Problem(f"model: {source}", listed(model), "the model of the checkpoint", mend)
        )
    if code := _recoded(saved.get("code") or {}, description.get("code") or {}):
        raise ConfigError(Problem(f"code: {source}", listed(code), "that of the checkpoint", mend))
    steering = _differences(_steering(saved), _steering(description)) if "config" in saved else []
    known = saved.get("versions") or {}  # DeepSpeed's alone, of an imported one
    versions = description.get("versions") or known
    steering += _differences(known, {name: versions.get(name) for name in known})
    return [f"changed since the checkpoint: {line}" for line in steering]


def _held(config: Config, request: Request) -> tuple[Path, str, list[str]]:
    """Lock and return the run's folder; its state: "begins", "goes on" or "finished"; and lines for
    the user.
    """
    # a run that failed its checks has written no config, so its name is free again
    last = next(number for number in count() if not _has_run(_numbered(config, number + 1)))
    number, state, lines = _after(
        config, last, _judged(config, request, _numbered(config, last)) if last else ""
    )
    folder = _numbered(config, number)
    if state == "goes on":
        _take_over(folder)
    while (
        state == "begins" and hold(folder) is None
    ):  # another command was started at the same moment
        number += 1
        folder = _numbered(config, number)
    return folder, state, lines


def _held_by_each(config: Config, request: Request, ranks: Ranks) -> tuple[Path, str, list[str]]:
    """Lock a folder of the same name on each machine, as `_held` does for a shared one. Collective.

    A machine without the run follows those that have it. Raises ConfigError if they have different
    runs.
    """
    last = max(
        max(numbers, default=0) for numbers in ranks.each_keeper(lambda: _numbers(config)).values()
    )

    def look() -> tuple[str, Any] | None:
        folder = _numbered(config, last)
        return (
            (_judged(config, request, folder), _beside_place(_request(folder)))
            if _has_run(folder)
            else None
        )

    found = {keeper: one for keeper, one in ranks.each_keeper(look).items() if one is not None}
    judged = [
        word
        for word in ("goes on", "finished", "unfinished")
        if word in {one[0] for one in found.values()}
    ]
    number, state, lines = _after(config, last, judged[0] if judged else "")
    if state != "begins" and (
        other := [rank for rank in found if found[rank][1] != found[min(found)][1]]
    ):
        seen = (
            f"{_numbered(config, last).name} on rank {other[0]} is another run than on rank "
            f"{min(found)}"
        )
        mend = (
            "Move the one away that is not of this run, or give this one another trainer.run.name"
        )
        raise shared(
            ConfigError(
                Problem("trainer.run.node_local", seen, "one run in the folders of all", mend)
            )
        )
    if state == "goes on":
        ranks.on_keepers(lambda: _take_over(_numbered(config, number)))
    while state == "begins" and not _held_on_each(_numbered(config, number), ranks):
        number += 1
    return _numbered(config, number), state, lines


def _held_on_each(folder: Path, ranks: Ranks) -> bool:
    return all(ranks.each_keeper(lambda: hold(folder) is not None).values())


def _judged(config: Config, request: Request, folder: Path) -> str:
    """Judge the run in a folder: "goes on" or "finished" if it is this one; else "unfinished" or
    empty.
    """
    if request.fresh or request.resume not in (None, "auto"):
        return ""
    finished = not _is_unfinished(folder)
    wanted = request.resume == "auto" or _training(_request(folder)) == _training(config.raw)
    if wanted and finished and request.resume is None and not request.script:
        return "finished"
    if wanted and (request.resume == "auto" or not finished):
        return "goes on"
    return "" if finished else "unfinished"


def _after(config: Config, last: int, judged: str) -> tuple[int, str, list[str]]:
    """Return this run's number, given the `last` of its name; its state, and lines for the user."""
    if judged in ("goes on", "finished"):
        return last, judged, []
    told = (
        f"{_numbered(config, last)} was not finished and was started otherwise; --resume auto "
        "goes on with it"
    )
    return last + 1, "begins", [told] if judged == "unfinished" else []


def _numbers(config: Config) -> list[int]:
    """List the numbers of all runs of that name on this machine; another one may have those in
    between.
    """
    base = _numbered(config, 1)
    runs = [path.name.rpartition("-") for path in base.parent.glob("*") if _has_run(path)]
    return [int(number) for name, _, number in runs if name == base.name and number.isdecimal()] + [
        1
    ] * _has_run(base)


def _has_run(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _beside_place(request: Any) -> Any:
    """Return a config as given, without the place of its run."""
    found = _training(request)
    if isinstance(found, dict) and isinstance(section := found.get("trainer"), dict):
        return found | {"trainer": {key: value for key, value in section.items() if key != "run"}}
    return found


def _numbered(config: Config, number: int) -> Path:
    section = config.trainer.run
    base = Path(section.folder) / (section.name or config.path.stem)
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def _take_over(folder: Path) -> None:
    """Lock a run's folder. Raises ConfigError if another process uses it: two would overwrite each
    other's files.

    Forks of a dead process may hold the lock for some seconds.
    """
    deadline = time.monotonic() + HELD_SECONDS
    while hold(folder) is None:
        found = status.read(folder)
        if status.lives(found) or time.monotonic() > deadline:
            seen = f"being trained by {status.whose(found)}" if found else "held by another process"
            mend = (
                "Wait for it, stop it, give this run another trainer.run.name, or start one "
                "beside it with --fresh"
            )
            raise ConfigError(
                Problem(f"trainer.run: {folder}", seen, "a run that nobody is at work on", mend)
            )
        time.sleep(0.5)


def hold(folder: Path) -> int | None:
    """Lock a folder until this process ends, in whatever way; None if another one has it. Raises
    DiskError.
    """
    checkpoint.ensure_writable(folder)
    handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # no locks on this file system
        if status.lives(status.read(folder)):
            os.close(handle)
            return None
    return handle


def _is_unfinished(folder: Path) -> bool:
    """Return True without a final model, or if it is older than the last start: the run was then
    resumed.
    """
    final, environment = folder / FINAL, folder / ENVIRONMENT
    return not final.exists() or (
        environment.exists() and final.stat().st_mtime < environment.stat().st_mtime
    )


def _training(request: Any) -> Any:
    """Return a config as given, without keys that do not affect the numbers of training."""
    if not isinstance(request, dict) or not isinstance(section := request.get("trainer", {}), dict):
        return request
    kept = {key: value for key, value in section.items() if key not in BESIDE["trainer"]}
    return {key: value for key, value in request.items() if key not in BESIDE[""]} | {
        "trainer": kept
    }


def _request(folder: Path) -> Any:
    """Return the config as given to the run in `folder`."""
    try:
        return parse_json(read_file(folder / ENVIRONMENT))["request"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _checkpoint(path: Path) -> Path:
    pickles = [file.name for file in path.rglob("*") if file.suffix in checkpoint.PICKLES]
    wrong = {
        "no such folder": not path.is_dir(),
        f"a folder with a pickle ({', '.join(pickles[:1])}), which is never opened": bool(pickles),
        "a model alone": (path / "config.json").is_file(),
        "a folder without a manifest.json": not (path / "manifest.json").is_file(),
    }
    if seen := next((text for text, holds in wrong.items() if holds), None):
        expected = "auto, or a folder such as runs/NAME/checkpoints/step-000100"
        mend = (
            "Start a run from it with trainer.model.name_or_path"
            if (path / "config.json").is_file()
            else ""
        )
        raise ConfigError(Problem(f"--resume: {path}", seen, expected, mend))
    return path


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise DiskError(*problems)


def _last_logged(path: Path) -> int:
    """Return the step of the last complete line of a metrics file; 0 if there is none."""
    for line in tail(path).split(b"\n")[-2::-1] if path.is_file() else ():
        with suppress(
            ValueError, TypeError, KeyError
        ):  # an incomplete line, from a machine that lost power
            return int(parse_json(line)["step"])
    return 0


def _steering(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the config that decide the numbers of a run, besides data, model and
    layout.
    """
    config = description.get("config", {})
    wanted = ("optimizer", "scheduler", "gradient_clipping", "train_batch_size")
    section = config.get("trainer") or {}
    own = {
        name: section.get(name) or []
        for name in ("freeze", "parameter_groups", "label_smoothing", "neftune_alpha")
    }  # older checkpoints have none
    return {name: config.get(name) for name in wanted} | {"seed": description.get("seed"), **own}


def _recoded(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List code whose digest changed; code that came or went shows in the code that uses it."""
    pairs = {name: (str(before[name]), now[name]) for name in sorted(before) if name in now}
    told = {
        name: "was edited" if "sha256" in pair[0] else " -> ".join(pair)
        for name, pair in pairs.items()
    }
    return [f"{name} {told[name]}" for name, (was, is_) in pairs.items() if was != is_]


def _differences(saved: Any, here: Any) -> list[str]:
    before, now = dict(leaves(saved)), dict(leaves(here))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [
        f"{key} {json.dumps(before.get(key))} -> {json.dumps(now.get(key))}" for key in sorted(keys)
    ]
