"""A run from its config to its folder: the only place where everything meets."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    nullcontext,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from trainer import checkpoint
from trainer.config import Config, support
from trainer.data.loader import Batching, BatchLoader
from trainer.distributed.ranks import Ranks
from trainer.engines import Engine, Job, Machine
from trainer.engines.devices import peak_of
from trainer.errors import MeshloomError
from trainer.models.spec import stored
from trainer.optim.lr_schedules import schedule_of
from trainer.run import describe, resume
from trainer.run.hooks import SLOW_DISK, RunHooks, Saver, export, finish, saved_bytes
from trainer.run.loop import LoopPlan
from trainer.run.loop import train as loop
from trainer.run.metrics import Meter
from trainer.run.prepare import Prepared, prepare
from trainer.run.resume import Request, Start
from trainer.run.subject import Given
from trainer.run.timeline import StepProfiler, Timeline
from trainer.state import RunState
from trainer.storage import Unfailing
from trainer.supervise.ending import Ending, watched_in_script
from trainer.supervise.notes import notes_of
from trainer.supervise.output import Output, Signs
from trainer.supervise.phase import Phase
from trainer.supervise.process import join, quiet_libraries
from trainer.supervise.signals import NoSignals, StopSignals, preempted, stop_signals
from trainer.supervise.world import World, leave_with_launcher, world_of
from trainer.trackers import Evaluation, Record, Tracker, open_trackers, say


@dataclass(frozen=True)
class Result:
    """The result of a run on this rank; it is not sent between ranks."""

    folder: Path
    """The run's folder: checkpoints, `metrics.jsonl`, and `final/` with the model."""
    records: tuple[Record, ...]
    """Records of the logged steps (`trainer.log.every`) since this start."""
    evaluations: tuple[Evaluation, ...]

    @property
    def losses(self) -> list[float]:
        """The mean losses of the logged steps, over the targets of each global batch."""
        return [record.loss for record in self.records]


class History:
    """A tracker that keeps records and evaluations in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.evaluations: list[Evaluation] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

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
    try:
        signs.at(
            f"waiting for {world.world_size} ranks" if world.world_size > 1 else "making ready"
        )
        machine = join(config, world, output.say)
        watch = ending.start_watch(config, machine.ranks, lambda line: say(console, line))
        quiet_libraries()
        log_to = lambda folder: output.log_to(ending.begin_in(folder))  # noqa: E731
        execute(
            config, request, replace(machine, watch=watch, signs=signs), console, signals, log_to
        )
        if machine.ranks.world_size > 1:
            watch.at(Phase.LEAVING)
            dist.barrier()
        return ending.end(0)
    except BaseException as error:  # the last place where it can become an exit code
        with suppress(OSError):  # the disk that holds the log may be full
            traceback.print_exc()
        if not isinstance(error, MeshloomError) and signals.explain_failure(
            others=world.world_size > 1
        ):
            error = preempted(0)
        signals.release()
        return ending.after(error)


def train_given(config: Config, given: Given, request: Request, quiet: bool) -> Any:
    """Run one rank's share of a run. Collective."""
    world = world_of(os.environ)
    assert world is not None
    terminal = cast(TextIO, Unfailing(sys.stdout))
    console = Console(file=terminal, highlight=False, quiet=quiet or world.rank != 0)
    signs = Signs(console)
    machine = replace(join(config, world), signs=signs)
    quiet_libraries()
    with closing(signs), stop_signals() as signals, watched_in_script(config, machine) as machine:
        return execute(config, request, machine, console, signals, given=given)


def execute(
    config: Config,
    request: Request,
    machine: Machine,
    console: Console,
    signals: StopSignals | NoSignals,
    log_to: Callable[[Path], None] = lambda folder: None,
    given: Given | None = None,
) -> Result | None:
    """Run in processes that have met; None for a dry run. `log_to` is called with the run's folder.
    Collective.
    """
    signs = machine.signs
    signs.at("looking at the run's folder")
    start = (
        None
        if request.dry_run or request.preview is not None
        else resume.choose(config, request, machine.ranks)
    )
    if start is not None and start.finished:
        again = "--fresh starts one like it, more trainer.steps make it longer with --resume auto"
        say(console, f"finished: {start.folder / 'final'} is there already; {again}")
        return None
    if start is not None:
        log_to(start.folder)
        machine = replace(machine, ranks=start.ranks)
    prepared = prepare(config, machine, given, console, builds=start is not None)
    signs.hide()
    if request.preview is not None:
        for line in describe.preview_lines(prepared, request.preview):
            console.print(Text(line, "green" if line.startswith("  + ") else ""), soft_wrap=True)
        return None
    for line in (*describe.plan_lines(prepared, request.dry_run), *_gpu_notes(prepared, machine)):
        say(console, line)
    if start is None:
        return None
    history = History() if request.script else None
    _train(prepared, request, machine, start, console, signals, [history] if history else [])
    if history is None:  # a command's result is its folder
        return None
    return Result(start.folder, tuple(history.records), tuple(history.evaluations))


def _train(
    prepared: Prepared,
    request: Request,
    machine: Machine,
    start: Start,
    console: Console,
    signals: StopSignals | NoSignals,
    trackers: list[Tracker],
) -> None:
    """Train and export the model. `trackers` are used on every rank; those of the config on rank
    0.
    """
    config, ranks = prepared.config, machine.ranks
    section, folder, source = config.trainer, start.folder, start.source
    changed = []
    if source is not None and not request.resume_anyway:
        changed = ranks.on_first(
            lambda: resume.refuse_changed(source, describe.run_description(prepared))
        )
    for line in [*start.lines, *changed]:
        say(console, f"resume  {line}")
    ranks.on_keepers(
        lambda: checkpoint.ensure_writable(folder / "checkpoints", saved_bytes(prepared))
    )
    ranks.on_keepers(lambda: describe.write(folder, prepared, machine, request.overrides))
    machine.watch.plan(prepared.steps)
    compared = request.memory_check(prepared, machine, folder, console)
    machine.watch.at(Phase.BUILDING)
    machine.signs.at("building the engine, and the model's values")
    machine.watch.moves(saved_bytes(prepared) / SLOW_DISK)
    engine, position = _built(prepared, request, machine, source, console)
    with ExitStack() as stack:
        if ranks.first:
            trackers += open_trackers(section.log.trackers, folder, console, prepared.subject.unit)
        for tracker in trackers:
            stack.callback(tracker.close)
        loader = stack.enter_context(_loader(prepared, machine, position))
        flops = prepared.subject.flops(section)
        sharers = prepared.layout.world_size // prepared.layout.data_ranks
        meter = Meter(
            prepared.steps,
            machine.device,
            sharers,
            flops,
            peak_of(machine.device),
            loader,
            position,
        )
        saver: Saver = lambda entries, write: write(entries, ranks)  # noqa: E731
        if section.checkpoint.asynchronous:
            saver = stack.enter_context(checkpoint.Background(ranks.on_host())).save
        watchers = _watchers(stack, prepared, machine, folder, position, source)
        hooks = RunHooks(
            prepared, machine, folder, engine, meter, trackers, console, saver, signals, watchers
        )
        signals.saving()
        machine.signs.at("making the first step")
        schedule = schedule_of(
            vars(config.optimizer), vars(config.scheduler) if config.scheduler else None
        )
        with _reports(config, ranks, console), prepared.subject.check:
            position = loop(engine, loader, schedule, _plan(prepared), hooks, position)
    machine.signs.hide()
    machine.watch.at(Phase.FINISHING)
    machine.watch.moves(saved_bytes(prepared) / SLOW_DISK)
    if hooks.patience.line is not None:
        say(console, f"note: {hooks.patience.line}")
    elif position.step < prepared.steps:
        ranks.barrier()  # a launcher ends the others soon after the first has left
        raise preempted(position.step)
    export(prepared, engine, folder, ranks)
    for line in compared():
        say(console, line)
    with _reports(config, ranks, console):
        engine.close()
    if ranks.first:
        finish(prepared, folder, console)


def _plan(prepared: Prepared) -> LoopPlan:
    section = prepared.config.trainer
    every = section.log.every, section.checkpoint.every, section.evaluation.every
    return LoopPlan(prepared.steps, prepared.layout.train_batch, *every)


def _built(
    prepared: Prepared, request: Request, machine: Machine, source: Path | None, console: Console
) -> tuple[Engine, RunState]:
    """Build the engine, with the state of checkpoint `source` if any; return it and the position.
    Collective.
    """
    config, ranks, position = prepared.config, machine.ranks, RunState()
    seed, deepspeed = config.trainer.seed, config.deepspeed
    engine = prepared.engine.build(
        Job(
            prepared.layout,
            prepared.subject.spec,
            prepared.subject.task,
            deepspeed,
            seed,
            machine,
            prepared.undecayed,
        )
    )
    prepared.subject.spec.weights.release()
    for note in engine.notes:
        say(console, f"note: {note}")
    if source is not None:
        machine.signs.at(f"reading {source}")
        if not request.weights_only:
            engine.restore(
                ranks.on_first(lambda: checkpoint.read_description(source)["position"]["engine"])
            )
        entries = stored(prepared.subject.spec, engine.state_tensors())
        position = checkpoint.load(source, entries, ranks, request.weights_only)
        say(
            console,
            f"resumed from {source}: step {position.step}, {position.samples:,} samples seen",
        )
    return engine, position


def _watchers(
    stack: ExitStack,
    prepared: Prepared,
    machine: Machine,
    folder: Path,
    position: RunState,
    source: Path | None,
) -> list[Callable[[Phase, int], None]]:
    """Return the watchers of the loop's phases on this rank: the timeline and, if requested, a
    profiler.
    """
    wanted, first = prepared.config.trainer.profile, machine.ranks.first
    timeline = stack.enter_context(
        Timeline(folder if first else None, prepared.steps, position.step, source)
    )
    if wanted is None or not first:
        return [timeline.at]
    profiler = StepProfiler(wanted, folder, machine.device)
    stack.callback(profiler.close)
    return [lambda phase, step: timeline.at(Phase.PROFILING, step), profiler.at, timeline.at]


def _reports(config: Config, ranks: Ranks, console: Console) -> AbstractContextManager[Any]:
    """Send the config's breakdowns to the user: DeepSpeed prints them on the first rank."""
    return (
        redirect_stdout(console.file)
        if ranks.first and support.has_reports(config)
        else nullcontext()
    )


def _loader(prepared: Prepared, machine: Machine, position: RunState) -> BatchLoader:
    subject, seed = prepared.subject, prepared.config.trainer.seed
    batching = Batching.of(prepared.layout, machine.ranks.rank, machine.device, prepared.workers)
    steps = range(position.step, prepared.steps)
    return BatchLoader(
        subject.data.train,
        subject.task.collate,
        batching,
        steps,
        seed=seed,
        position=position.samples,
    )


def _gpu_notes(prepared: Prepared, machine: Machine) -> Iterator[str]:
    """Yield notes: matrix products could be many times as fast; a slow rank is not detected."""
    if machine.device.type != "cuda":
        return
    if prepared.layout.precision == "float32" and torch.get_float32_matmul_precision() == "highest":
        yield (
            "note    float32 on a GPU, without TF32: matrix products take several times as long as "
            "they could. Set "
            "bf16.enabled=true, or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment for "
            "TF32's 10-bit mantissas"
        )
    if machine.ranks.world_size > 1:
        yield (
            "note    a rank that is slower than the others is not told here: it is found by whose "
            "host waits in "
            "collectives, and NCCL's wait on the device"
        )
