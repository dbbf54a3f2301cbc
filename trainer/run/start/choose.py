"""The choice of a run's folder and of the checkpoint to resume from, and what refuses it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from uuid import uuid4

from trainer import checkpoint
from trainer.checkpoint.copies.marks import MARK, mark_at
from trainer.checkpoint.copies.restoration import has_restored, restore, settle
from trainer.checkpoint.copies.upload import Upload, check
from trainer.checkpoint.directory import check_same
from trainer.config import Config
from trainer.config.read import at
from trainer.config.sections.section import TEXT
from trainer.data.order import KEYED, LISTED
from trainer.data.progress import QUIET, Progress
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, DiskError, Problem, in_python
from trainer.run.prepare import BEGINS, Begun
from trainer.run.start import folder as folders
from trainer.run.start.changes import training_keys, without_place
from trainer.run.start.folder import ENVIRONMENT
from trainer.run.start.request import Request, Start
from trainer.storage import parse_json, read_file, replace_file, tail, to_json
from trainer.supervise import locks
from trainer.supervise import status_files as status


class Earlier(StrEnum):
    """The state of the run in a folder, seen from the command that starts."""

    NONE = "none"
    RESUMES = "resumes"
    FINISHED = "finished"
    ANOTHER = "another"
    """Unfinished, and started otherwise."""


def choose(config: Config, request: Request, ranks: Ranks, progress: Progress = QUIET) -> Start:
    """Choose the folder `runs/NAME`, or the first free of NAME-2, ..., and the checkpoint.

    Collective. The same command again resumes a run that was not finished, and reports another one
    as finished. The folder is locked until this process ends. Raises ConfigError for a path that is
    no checkpoint and for a run in progress, and DiskError if the folder can't be written, or
    checkpoints were saved and none is good.
    """
    base = folders.base_of(config)
    if config.trainer.run.node_local:
        ranks = folders.kept(base.parent, ranks)
    address = config.trainer.checkpoint.upload
    back = _brought_back(address, base, request, ranks, progress)
    folder, state, lines = _taken(base, config.raw, request, ranks)
    if state == Earlier.FINISHED:
        return _finished(config, folder, ranks)
    if len(set(ranks.node_firsts)) < 2:
        folders.check_shared(folder, ranks)
    below = checkpoint.WEIGHTS_ALONE if request.weights_only else checkpoint.ALL
    source = None
    if request.path is not None:
        source = _given(request.path, ranks, below)
    elif state == Earlier.RESUMES:
        source, lines = _newest(folder, ranks, below)
    upload = _upload(address, folder, ranks) if address else None
    ranks.on_node_firsts(lambda: status.begin(folder))  # its earlier end is forgotten
    if request.script:
        lines = [in_python(line) for line in lines]
    begun = BEGINS if source is None else ranks.on_node_firsts(lambda: _begun(source))
    return Start(folder, source, [*back, *lines], ranks=ranks, begun=begun, upload=upload)


def _finished(config: Config, folder: Path, ranks: Ranks) -> Start:
    """Find what of a finished run is not elsewhere yet. Collective; raises as `choose`."""
    address = config.trainer.checkpoint.upload
    hub = config.trainer.hub
    pushes = hub is not None and ranks.on_first(lambda: not folders.is_pushed(folder, hub))
    own = ranks.on_first(lambda: mark_at(str(folder)))
    lacks = bool(address and ranks.await_first(lambda: Upload(address, folder).lacking(own)))
    upload = None
    if lacks or pushes:
        ranks.on_node_firsts(lambda: locks.take_over(folder))
        ranks.on_node_firsts(lambda: status.begin(folder))
        upload = _upload(address, folder, ranks) if address and lacks else None
    return Start(folder, finished=True, ranks=ranks, upload=upload, pushes=pushes)


def _brought_back(
    address: str | None, base: Path, request: Request, ranks: Ranks, progress: Progress
) -> list[str]:
    """Check an address; copy the run from there if no machine has it. Return lines. Collective.

    A restore that was killed is ended, or begun again.
    """
    if address:
        progress.begin(address)  # which may not answer for a while
        ranks.on_first(lambda: check(address))
    begins = request.fresh or request.path is not None

    def bring() -> list[str]:
        with locks.one_at_a_time(base.parent, progress.moves):
            settle(base)
            wanted = address and not begins and not folders.numbers(base)
            return restore(address or "", base, progress) if wanted else []

    here = any(ranks.each_node_first(lambda: folders.numbers(base)).values())
    unsettled = ranks.on_first(lambda: has_restored(base))
    return ranks.await_first(bring) if unsettled or (address and not begins and not here) else []


def _upload(address: str, folder: Path, ranks: Ranks) -> Upload:
    """Become the only writer of the copy at an address. Collective; raises DiskError."""
    upload = Upload(address, folder)
    marks = ranks.each_node_first(lambda: mark_at(str(folder)))
    mark = ranks.on_first(lambda: next(filter(None, marks.values()), {"token": uuid4().hex}))
    ranks.on_node_firsts(lambda: replace_file(folder / MARK, to_json(mark)))
    ranks.await_first(lambda: upload.claim(mark))
    settled = {key: value for key, value in mark.items() if key != "damaged"}
    ranks.on_node_firsts(lambda: replace_file(folder / MARK, to_json(settled)))
    return upload


def _taken(base: Path, raw: object, request: Request, ranks: Ranks) -> tuple[Path, str, list[str]]:
    """Lock the run's folder on each machine; return it, the run's state, and lines for the user.

    A machine without the run follows those that have it. Collective; raises ConfigError if they
    have different runs.
    """
    of_machines = ranks.each_node_first(lambda: folders.numbers(base)).values()
    known = {number for numbers in of_machines for number in numbers}
    last = next(number for number in count() if number + 1 not in known)
    if len(of_machines) > 1:  # earlier runs may have been on machines that are gone
        last = max(known, default=0)
    folder = folders.numbered(base, last)

    def look() -> tuple[str, object] | None:
        if not last or not folders.has_run(folder):
            return None
        return _state(folder, raw, request), without_place(_request(folder))

    states_of = {
        node_first: one
        for node_first, one in ranks.each_node_first(look).items()
        if one is not None
    }
    states = {state for state, _ in states_of.values()}
    state = next(
        (one for one in (Earlier.RESUMES, Earlier.FINISHED, Earlier.ANOTHER) if one in states),
        Earlier.NONE,
    )
    if state in (Earlier.RESUMES, Earlier.FINISHED):
        first = min(states_of)
        if other := [rank for rank in states_of if states_of[rank][1] != states_of[first][1]]:
            actual = f"{folder.name} on rank {other[0]} is another run than on rank {first}"
            other_name = "give this one another trainer.run.name"
            hint = f"Move away the one that is not of this run, or {other_name}"
            expected = "one run in the folders of all"
            raise ConfigError(Problem("trainer.run.node_local", actual, expected, hint)).share()
        if state == Earlier.RESUMES:
            ranks.on_node_firsts(lambda: locks.take_over(folder))
        return folder, state, []
    note = f"{folder} was not finished, and had other settings; --resume auto resumes it"
    lines = [note] if state == Earlier.ANOTHER else []
    number = last + 1
    while not _lock_everywhere(folders.numbered(base, number), ranks):
        number += 1  # another command was started at the same moment
    return folders.numbered(base, number), Earlier.NONE, lines


def _lock_everywhere(folder: Path, ranks: Ranks) -> bool:
    return all(ranks.each_node_first(lambda: locks.hold(folder)).values())


def _state(folder: Path, raw: object, request: Request) -> str:
    """Return the state of the run in a folder, by which this one resumes it or begins."""
    if request.fresh or request.path is not None:
        return Earlier.NONE
    finished = not folders.is_unfinished(folder)
    if request.resume == "auto":
        return Earlier.RESUMES
    if training_keys(_request(folder)) == training_keys(raw):
        if not finished:
            return Earlier.RESUMES
        if not request.script:
            return Earlier.FINISHED
    return Earlier.NONE if finished else Earlier.ANOTHER


def _given(path: Path, ranks: Ranks, below: tuple[str, ...]) -> Path:
    """Verify the checkpoint that the user gave. Raises ConfigError or DiskError. Collective."""
    ranks.on_node_firsts(lambda: _check_path(path))
    problems = checkpoint.verify(path, ranks, below)
    ranks.on_first(lambda: _refuse(problems))
    check_same(path, sorted(set(ranks.node_firsts)), ranks)
    return path


def _newest(folder: Path, ranks: Ranks, below: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """Find the run's newest good checkpoint, if any, with lines for the user. Collective."""
    directory = folder / "checkpoints"
    source, lines = checkpoint.newest(directory, ranks, below)
    beside = ranks.each_node_first(lambda: checkpoint.leftovers(directory)).values()
    if left := sorted({path.name for paths in beside for path in paths}):
        lines = [*lines, f"left over in {directory}: {', '.join(left)}"]
    if source is None and any(checkpoint.DAMAGED in name for name in left):
        hint = "Repair one and give its path to --resume, or start a new run with --fresh"
        problem = Problem(str(directory), "; ".join(lines), hint=hint)
        ranks.on_first(lambda: _refuse([problem]))
    step = checkpoint.step_of(source) if source else 0
    logged = ranks.on_first(lambda: _last_logged(folder / "metrics.jsonl"))
    if logged > step:
        lost = f"steps {step + 1} to {logged} came after the last good checkpoint"
        lines = [*lines, f"{lost} and are repeated"]
    return source, lines


def as_begun(config: Config, start: Start) -> Config:
    """Return the config with what the resumed run decided on its documents, if that is open.

    So a run that began while chats were concatenated by default resumes so.
    """
    data = config.trainer.data
    source = start.source
    if source is None or data.documents is not None or config.trainer.task not in TEXT.names:
        return config
    saved = start.ranks.on_node_firsts(
        lambda: checkpoint.read_description(source).get("config") or {}
    )
    documents = at(saved, "trainer.data.documents")
    if documents not in ("concatenate", "pad", "pack"):
        return config
    data = data.model_copy(update={"documents": documents})
    origins = config.origins | {"trainer.data.documents": "auto: as the resumed run began"}
    trainer = config.trainer.model_copy(update={"data": data})
    return replace(config, trainer=trainer, origins=origins)


def _begun(source: Path) -> Begun:
    """Return order and engine of a checkpoint's run. Raises DiskError for an unknown order."""
    description = checkpoint.read_description(source)
    order = description.get("order", LISTED)
    if order not in (LISTED, KEYED):
        expected = f"{LISTED} or {KEYED}"
        hint = "Resume with the version that saved it"
        raise DiskError(Problem(f"{source}: order", f"{order!r:.40}", expected, hint))
    return Begun(int(order), description.get("engine"))


def _request(folder: Path) -> object:
    """Return the config as given to the run in `folder`."""
    try:
        return parse_json(read_file(folder / ENVIRONMENT))["request"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _check_path(path: Path) -> None:
    pickles = [file.name for file in path.rglob("*") if file.suffix in checkpoint.PICKLES]
    is_model = (path / "config.json").is_file()
    hint = "Start a run from it with trainer.model.name_or_path" if is_model else ""
    if not path.is_dir():
        actual = "no such folder"
    elif pickles:
        actual = f"a folder with a pickle ({pickles[0]}), which is never opened"
    elif is_model:
        actual = "a model alone"
    elif not (path / "manifest.json").is_file():
        actual = "a folder without a manifest.json"
    else:
        return
    expected = "auto, or a folder such as runs/NAME/checkpoints/step-000100"
    raise ConfigError(Problem(f"--resume: {path}", actual, expected, hint))


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise DiskError(*problems)


def _last_logged(path: Path) -> int:
    """Return the step of the last complete line of a metrics file; 0 if there is none."""
    for line in tail(path).split(b"\n")[-2::-1] if path.is_file() else ():
        # a line may be incomplete, from a machine that lost power
        with suppress(ValueError, TypeError, KeyError):
            return int(parse_json(line)["step"])
    return 0
