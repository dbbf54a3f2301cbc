"""A run from its config to its folder: the only place where everything meets."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from trainer import checkpoint
from trainer.config import Config, support
from trainer.data.loader import Batching, BatchLoader
from trainer.data.order import KEYED
from trainer.data.progress import Progress
from trainer.data.remote import absent
from trainer.engines import Engine, Job, Machine
from trainer.errors import DiskError, MeshloomError, listed
from trainer.models.spec import stored
from trainer.recipe import HandedIn
from trainer.run import describe
from trainer.run.hooks import RunHooks, export, finish
from trainer.run.loop import train as loop
from trainer.run.prepare import Prepared, prepare
from trainer.run.start.changes import refuse_changed
from trainer.run.start.choose import as_begun, choose
from trainer.run.start.folder import FINAL, not_pushed
from trainer.run.start.request import Request, Start
from trainer.state import RunState
from trainer.storage import Unfailing
from trainer.supervise.ending import Ending, watched_in_script
from trainer.supervise.locks import release
from trainer.supervise.notes import notes_of
from trainer.supervise.output import Output, Signs
from trainer.supervise.process import cache_folder, join, quiet_libraries
from trainer.supervise.signals import Signals, StopSignals, stop_signals, stopped_at
from trainer.supervise.stall import Phase
from trainer.supervise.world import World, leave_with_launcher, world_of
from trainer.trackers import Epoch, Evaluation, Record, Tracker, say

SLOW_NETWORK = 1e5
"""The lowest speed of an upload, in bytes/s, that is no hang."""


@dataclass(frozen=True)
class Result:
    """The result of a run on this rank; it is not sent between ranks."""

    folder: Path
    """The run's folder: checkpoints, `metrics.jsonl`, and `final/` with the model."""
    records: tuple[Record, ...]
    """Records of the logged steps (`trainer.log.every`) since this start."""
    evaluations: tuple[Evaluation, ...]
    epochs: tuple[Epoch, ...] = ()
    """The mean losses of the epochs that ended since this start, unless the run is in steps."""

    @property
    def losses(self) -> list[float]:
        """The mean losses of the logged steps, over the targets of each global batch."""
        return [record.loss for record in self.records]


class History:
    """A tracker that keeps records, epochs and evaluations in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.epochs: list[Epoch] = []
        self.evaluations: list[Evaluation] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

    def epoch(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)

    def evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def close(self) -> None: ...


def run(
    config: Config, request: Request, world: World, output: Output, signals: StopSignals
) -> int:
    """Train, or with `dry_run` show what would be trained; return the exit code. Collective."""
    console, signs = output.console, output.signs
    notes = notes_of(os.environ)
    ending = Ending(world, output.terminal, notes, signs.close)
    signals.when_unnoticed(ending.after)
    if world_of(os.environ) is not None:
        leave_with_launcher(own=notes is not None)
    several = world.world_size > 1
    try:
        signs.at(f"waiting for {world.world_size} ranks" if several else "making ready")
        machine = join(config, world, output.say)
        watch = ending.start_watch(config, machine.ranks, lambda line: say(console, line))
        quiet_libraries()
        machine = replace(machine, watch=watch, signs=signs)
        log_to = lambda folder: output.log_to(ending.begin_in(folder))  # noqa: E731
        execute(config, request, machine, console, signals, log_to)
        if several:
            watch.at(Phase.LEAVING)
            dist.barrier()
        return ending.end(0)
    except BaseException as error:  # the last place where it can become an exit code
        with suppress(OSError):  # the disk that holds the log may be full
            traceback.print_exc()
        if not isinstance(error, MeshloomError) and signals.explain_failure(others=several):
            error = signals.error
        signals.release()
        return ending.after(error)


def train_given(config: Config, given: HandedIn | None, request: Request, quiet: bool) -> Any:
    """Run one rank's share of a run. Collective."""
    world = world_of(os.environ)
    assert world is not None
    terminal = cast(TextIO, Unfailing(sys.stdout))
    console = Console(file=terminal, highlight=False, quiet=quiet or world.rank != 0)
    signs = Signs(console)
    machine = replace(join(config, world), signs=signs)
    quiet_libraries()
    with closing(signs), stop_signals() as signals, watched_in_script(config, machine) as machine:
        try:
            return execute(config, request, machine, console, signals, given=given)
        finally:
            release()


def execute(
    config: Config,
    request: Request,
    machine: Machine,
    console: Console,
    signals: Signals,
    log_to: Callable[[Path], None] = lambda folder: None,
    given: HandedIn | None = None,
) -> Result | None:
    """Run in processes that have met; None for a dry run. `log_to` takes the folder. Collective."""
    machine.signs.at("looking at the run's folder")
    progress = Progress(console, machine.watch.moves, machine.signs)
    start = choose(config, request, machine.ranks, progress) if request.trains else None
    push = None
    if start is not None:
        if not start.finished or start.upload is not None or start.pushes:
            log_to(start.folder)
        config = as_begun(config, start)
        machine = replace(machine, ranks=start.ranks)
        hub = config.trainer.hub
        if hub is not None and (start.pushes or not start.finished):
            machine.signs.at("looking at the repository on the Hub")
            push = start.ranks.on_own(lambda: request.open_hub(hub) if start.ranks.first else str)
        if start.finished:
            _complete(config, start, push, machine, console, signals)
            return None
    given = HandedIn.by_task(config.trainer, given)
    data, cache = config.trainer.data, cache_folder()
    if request.dry_run and (away := machine.ranks.on_first(lambda: absent(data, cache))):
        say(console, f"data    {listed(away)}: a run copies it to {cache}, and is planned then")
        return None
    order = start.order if start else KEYED
    prepared = prepare(config, machine, given, console, builds=start is not None, order=order)
    machine.signs.hide()
    if request.preview is not None:
        for line in describe.preview_lines(prepared, request.preview):
            console.print(Text(line, "green" if line.startswith("  + ") else ""), soft_wrap=True)
        return None
    for line in (*describe.plan_lines(prepared, request.dry_run), *_gpu_notes(prepared, machine)):
        say(console, line)
    if start is None:
        return None
    history = History()
    trackers = [history] if request.script else []
    # before the model is in memory, of which the process that prepares files would keep a copy
    with prepared.subject.reading(_place(request, start, machine)), _left(prepared, start, request):
        _train(prepared, request, machine, start, console, signals, trackers)
    if push is not None:
        _push(push, start.folder, machine, console, signals)
    if not request.script:  # a command's result is its folder
        return None
    evaluations, epochs = tuple(history.evaluations), tuple(history.epochs)
    return Result(start.folder, tuple(history.records), evaluations, epochs)


def _complete(
    config: Config,
    start: Start,
    push: Callable[[Path], str] | None,
    machine: Machine,
    console: Console,
    signals: Signals,
) -> None:
    """Copy and push what of a finished run is not elsewhere yet; then say that it is finished.
    Collective."""
    machine.signs.hide()
    machine.watch.at(Phase.FINISHING)
    _uploaded(config, start, machine, console)
    if push is not None:
        _push(push, start.folder, machine, console, signals)
    again = "--fresh starts a new run, and more trainer.steps continue it"
    place = f"{start.folder / FINAL} is there already"
    say(console, f"finished: {place}; {again} with --resume auto")


@contextmanager
def _left(prepared: Prepared, start: Start, request: Request) -> Iterator[None]:
    """Leave a script's process as it was: other runs may follow."""
    try:
        yield
    finally:
        if request.script:
            prepared.engine.forget()
            if start.upload is not None:
                start.upload.close()


def _train(
    prepared: Prepared,
    request: Request,
    machine: Machine,
    start: Start,
    console: Console,
    signals: Signals,
    trackers: Sequence[Tracker],
) -> None:
    """Train and export the model. Every rank has `trackers`; the first has the config's, too."""
    ranks, folder, subject = machine.ranks, start.folder, prepared.subject
    _write_down(prepared, request, machine, start, console)
    if start.upload is not None and ranks.first:
        start.upload.soon(partial(say, console))  # what an earlier process has not copied
    compared = request.memory_check(prepared, machine, folder, console)
    machine.watch.at(Phase.BUILDING)
    machine.signs.at("building the engine, and the model's values")
    machine.watch.moves(prepared.save_seconds)
    engine, position = _built(prepared, request, machine, start.source, console)
    shows = ranks.first and support.has_reports(prepared.config)  # which DeepSpeed prints
    reports = redirect_stdout(console.file) if shows else nullcontext()
    parts = (prepared, machine, start, position, engine)
    with (
        _loader(prepared, machine, position) as loader,
        RunHooks(*parts, console, signals, trackers, request.callbacks) as hooks,
    ):
        hooks.wait(position.step)
        signals.saving()
        hooks.callbacks.call("on_train_begin", folder, engine.modules)
        machine.signs.at("making the first step")
        with reports, subject.check:
            position = loop(engine, loader, prepared.schedule, prepared.plan, hooks, position)
    machine.signs.hide()
    machine.watch.at(Phase.FINISHING)
    machine.watch.moves(prepared.save_seconds)
    if hooks.patience.line or hooks.callbacks.ended:
        say(console, f"note: {hooks.patience.line or 'stopped: a callback has ended the run'}")
    elif position.step < prepared.steps:
        try:
            _uploaded(prepared.config, start, machine, console)
        except DiskError as error:  # all is saved here, and the next start copies it
            say(console, f"note: {error}")
        # by all, since a launcher ends the others soon after the first has left
        number = ranks.highest_soon(signals.number)()
        raise stopped_at(position.step, number)
    export(prepared, engine, folder, ranks)
    for line in compared():
        say(console, line)
    with reports:
        engine.close()
    if ranks.first:
        finish(prepared, folder, console)
    _uploaded(prepared.config, start, machine, console)
    hooks.callbacks.call("on_train_end", folder)


def _uploaded(config: Config, start: Start, machine: Machine, console: Console) -> None:
    """Bring the run's copy elsewhere up to date, if it has one. Collective; raises DiskError."""
    if (upload := start.upload) is None:
        return
    say(console, f"copying what is missing to {config.trainer.checkpoint.upload}")
    kept = config.trainer.checkpoint

    def finish() -> str:
        def moved(count: int) -> None:
            machine.watch.moves()

        return upload.finish(moved, (kept.keep_last, kept.keep_best))

    say(console, f"copied: {machine.ranks.await_first(finish)}")


def _give_time(folder: Path, machine: Machine) -> None:
    """Have the watchdog wait as long as a slow network takes for a run's files. Collective."""
    sizes = (path.stat().st_size for path in folder.glob("*/**/*") if path.is_file())
    machine.watch.moves(machine.ranks.on_first(lambda: sum(sizes)) / SLOW_NETWORK)


def _push(
    push: Callable[[Path], str], folder: Path, machine: Machine, console: Console, signals: Signals
) -> None:
    """Push the final model to the Hub. Collective; raises HubError."""
    ranks = machine.ranks
    machine.watch.at(Phase.FINISHING)
    if ranks.first:
        signals.saved(not_pushed(folder, "a signal ended the push").share())
    say(console, f"pushing {folder / 'final'} to the Hub")
    _give_time(folder, machine)
    say(console, f"pushed: {ranks.await_first(partial(push, folder))}")


def _write_down(
    prepared: Prepared, request: Request, machine: Machine, start: Start, console: Console
) -> None:
    """Describe the run in its folder, once its checkpoint is seen to fit. Collective."""
    ranks, folder, source = machine.ranks, start.folder, start.source
    lines = start.lines
    if source is not None and not request.resume_anyway:
        description = describe.run_description(prepared)
        lines = [*lines, *ranks.on_first(lambda: refuse_changed(source, description))]
    for line in lines:
        say(console, f"resume  {line}")
    ranks.on_node_firsts(lambda: describe.write(folder, prepared, machine, request.overrides))
    machine.watch.plan(prepared.steps)


def _built(
    prepared: Prepared, request: Request, machine: Machine, source: Path | None, console: Console
) -> tuple[Engine, RunState]:
    """Build the engine, with the state of checkpoint `source`; and its position. Collective."""
    config, ranks, subject = prepared.config, machine.ranks, prepared.subject
    trained = prepared.layout, subject.spec, subject.task, config.deepspeed, config.trainer.seed
    engine = prepared.engine.build(Job(*trained, machine, prepared.undecayed))
    subject.spec.weights.release()
    for note in engine.notes:
        say(console, f"note: {note}")
    if source is None:
        return engine, RunState()
    machine.signs.at(f"reading {source}")
    if not request.weights_only:
        position = ranks.on_first(lambda: checkpoint.read_description(source)["position"])
        engine.restore(position["engine"])
    entries = stored(subject.spec, engine.state_tensors())
    state = checkpoint.load(source, entries, ranks, request.weights_only)
    say(console, f"resumed from {source}: step {state.step}, {state.samples:,} samples seen")
    return engine, state


def _place(request: Request, start: Start, machine: Machine) -> list[Any]:
    """Return the place in a stream of data at which a checkpoint was saved. Collective."""
    if (source := start.source) is None:
        return []
    known = machine.ranks.on_first(lambda: checkpoint.read_description(source))
    place = known.get("place") or []
    return place[:2] if request.resume_anyway else place  # its files may have changed


def _loader(prepared: Prepared, machine: Machine, position: RunState) -> BatchLoader:
    subject = prepared.subject
    return BatchLoader(
        subject.data.train,
        subject.task.collate,
        Batching.of(prepared.layout, machine.ranks.rank, machine.device, prepared.workers),
        range(position.step, prepared.steps),
        seed=prepared.config.trainer.seed,
        position=position.samples,
        order=prepared.order,
    )


def _gpu_notes(prepared: Prepared, machine: Machine) -> Iterator[str]:
    """Yield notes: matrix products could be many times as fast; a slow rank is not detected."""
    if machine.device.type != "cuda":
        return
    if prepared.layout.precision == "float32" and torch.get_float32_matmul_precision() == "highest":
        yield (
            "note    float32 on a GPU, without TF32: matrix products take several times the "
            "time. Set bf16.enabled=true, or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment"
        )
    if machine.ranks.world_size > 1:
        yield "note    a slow rank is not reported: NCCL waits on the device, not on the host"
