"""A run: config -> session -> prepare -> loop -> folder. The only place where everything meets."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from trainer import checkpoint
from trainer.config import Config, support
from trainer.data.loader import Batching, BatchLoader
from trainer.data.sources.remote import absent
from trainer.engines import Engine, EngineKind
from trainer.errors import DiskError, MeshloomError, Stopped, listed
from trainer.models.spec import stored
from trainer.recipe import HandedIn
from trainer.run import describe
from trainer.run.final import export, show
from trainer.run.hooks import RunHooks
from trainer.run.loop import train as loop
from trainer.run.precursor import measure_precursor
from trainer.run.prepare import BEGINS, Prepared, Purpose, prepare
from trainer.run.result import History, Result
from trainer.run.session import Session
from trainer.run.start.changes import refuse_changed
from trainer.run.start.request import Request
from trainer.state import RunState
from trainer.storage import Unfailing
from trainer.supervise.ending import Ending, watched_in_script
from trainer.supervise.locks import release
from trainer.supervise.notes import notes_of
from trainer.supervise.output import Output, Signs
from trainer.supervise.process import cache_folder, join, quiet_libraries
from trainer.supervise.signals import StopSignals, stop_signals, stopped_at
from trainer.supervise.stall import Phase
from trainer.supervise.world import World, leave_with_launcher, world_of


def run(
    config: Config, request: Request, world: World, output: Output, signals: StopSignals
) -> int:
    """Train, or with `dry_run` show what would be trained; return the exit code. Collective."""
    signs = output.signs
    notes = notes_of(os.environ)
    ending = Ending(world, output.terminal, notes, signs.close)
    signals.when_unnoticed(ending.after)
    if world_of(os.environ) is not None:
        leave_with_launcher(own=notes is not None)
    several = world.world_size > 1

    def log_in(folder: Path) -> None:
        output.log_to(ending.begin_in(folder))

    try:
        signs.at(f"waiting for {world.world_size} ranks" if several else "making ready")
        machine = join(config, world, output.say)
        session = Session(request, machine, output.console, signals, log_in=log_in)
        watch = ending.start_watch(config, machine.ranks, session.say)
        quiet_libraries()
        execute(session.watched_by(watch, signs), config)
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


def train_given(config: Config, given: HandedIn | None, request: Request, quiet: bool) -> Result:
    """Run one rank's share of a script's run. Collective."""
    world = world_of(os.environ)
    assert world is not None
    terminal = cast(TextIO, Unfailing(sys.stdout))
    console = Console(file=terminal, highlight=False, quiet=quiet or world.rank != 0)
    signs = Signs(console)
    machine = replace(join(config, world), signs=signs)
    quiet_libraries()
    with closing(signs), stop_signals() as signals, watched_in_script(config, machine) as machine:
        try:
            result = execute(Session(request, machine, console, signals), config, given)
            assert result is not None, "a script trains"
            return result
        finally:
            release()


def execute(session: Session, config: Config, given: HandedIn | None = None) -> Result | None:
    """Run in processes that have met; None unless a script trains. Collective."""
    request = session.request
    begun = BEGINS
    if request.trains:
        session.machine.signs.at("looking at the run's folder")
        session, config = session.begin(config)
        begun = session.start.begun
        if session.start.finished:
            with session.sharing():
                session.complete(config.trainer.checkpoint)
            return None
    elif request.dry_run and _waits_for_copies(session, config):
        return None
    if request.teacher_only:
        measure_precursor(session, config, None)
        return None
    given = HandedIn.by_task(config.trainer, given)
    purpose = Purpose(request.trains, begun)
    if request.preview is None:
        purpose = replace(purpose, choose_recompute=request.planner.choose_recompute)
    prepared = prepare(config, session.machine, given, session.console, purpose)
    session.machine.signs.hide()
    _show_plan(prepared, session)
    if not request.trains:
        return None
    history = History()
    if request.script:
        session = replace(session, trackers=[history])
    # before the model is in memory, of which the process that prepares files would keep a copy
    reading = prepared.subject.reading(_place(session))
    with reading, session.sharing(), _left(prepared.engine.kind, session):
        train(prepared, session)
    session.push()
    return history.result(session.folder) if request.script else None  # else it is the folder


def train(prepared: Prepared, session: Session) -> None:
    """Train and export the model. Collective."""
    section = prepared.config.trainer
    folder = session.folder
    ranks = session.ranks
    signs = session.machine.signs
    _write_down(prepared, session)
    session.copy_what_waits()
    check_memory = session.request.planner.check_memory
    compared = check_memory(prepared, session.machine, folder, session.console)
    measure_precursor(session, prepared.config, folder)
    engine, state = _built(prepared, session)
    prepared = prepared.before_training(engine, folder, state.step)
    subject = prepared.subject
    for note in subject.notes:
        session.say(f"note: {note}")
    prints = ranks.first and support.has_reports(prepared.config)  # reports of DeepSpeed's
    reports = redirect_stdout(session.console.file) if prints else nullcontext()
    with (
        _loader(prepared, session, state) as loader,
        RunHooks(prepared, session, engine, state) as hooks,
    ):
        hooks.wait(state.step)
        session.signals.saving()
        hooks.callbacks.call("on_train_begin", folder, engine.modules)
        signs.at("making the first step")
        with reports, subject.check:
            state = loop(engine, loader, prepared.schedule, prepared.plan, hooks, state)
    signs.hide()
    session.enter(Phase.FINISHING, prepared.save_seconds)
    if hooks.ended_early:
        session.say(f"note: {hooks.ended_early}")
    elif state.step < prepared.steps:
        raise _stopped(prepared, session, state)
    export(subject, engine, folder, ranks, prepared.exported_form)
    for line in compared():
        session.say(line)
    with reports:
        engine.close()
    if ranks.first:
        show(subject, section, folder, session.say)
    session.copy_all(section.checkpoint)
    hooks.callbacks.call("on_train_end", folder)


def _waits_for_copies(session: Session, config: Config) -> bool:
    """Return True, with a line, if a plan needs files that no run has copied yet. Collective."""
    data = config.trainer.data
    cache = cache_folder()
    if away := session.ranks.on_first(lambda: absent(data, cache)):
        session.say(f"data    {listed(away)}: a run copies it to {cache}, and is planned then")
    return bool(away)


def _show_plan(prepared: Prepared, session: Session) -> None:
    """Print the samples that were requested, or the plan."""
    request = session.request
    if request.preview is not None:
        for line in describe.preview_lines(prepared, request.preview):
            style = "green" if line.startswith("  + ") else ""
            session.console.print(Text(line, style), soft_wrap=True)
        return
    for line in describe.plan_lines(prepared, request.dry_run):
        session.say(line)
    for line in describe.device_notes(prepared.layout.precision, session.machine):
        session.say(line)


@contextmanager
def _left(engine: EngineKind, session: Session) -> Iterator[None]:
    """Leave a script's process as it was: other runs may follow."""
    try:
        yield
    finally:
        if session.request.script:
            engine.forget()
            if session.start.upload is not None:
                session.start.upload.close()


def _write_down(prepared: Prepared, session: Session) -> None:
    """Describe the run in its folder, once its checkpoint is seen to fit. Collective."""
    request = session.request
    ranks = session.ranks
    source = session.start.source
    lines = session.start.lines
    if source is not None and not request.resume_anyway:
        description = describe.run_description(prepared)
        lines = [*lines, *ranks.on_first(lambda: refuse_changed(source, description))]
    for line in lines:
        session.say(f"resume  {line}")
    folder = session.folder
    machine = session.machine
    overrides = request.overrides
    ranks.on_node_firsts(lambda: describe.write(folder, prepared, machine, overrides))
    machine.watch.plan(prepared.steps)


def _built(prepared: Prepared, session: Session) -> tuple[Engine, RunState]:
    """Build the engine, with the state of the checkpoint if there is one. Collective."""
    spec = prepared.subject.spec
    source = session.start.source
    ranks = session.ranks
    session.enter(Phase.BUILDING)
    session.machine.signs.at("building the engine, and the model's values")
    session.machine.watch.moves(prepared.save_seconds)
    engine = prepared.engine.kind.build(prepared.job(session.machine))
    spec.building.weights.release()
    for note in engine.notes:
        session.say(f"note: {note}")
    if source is None:
        return engine, RunState()
    session.machine.signs.at(f"reading {source}")
    weights_only = session.request.weights_only
    if not weights_only:
        position = ranks.on_first(lambda: checkpoint.read_description(source)["position"])
        engine.restore(position["engine"])
    entries = stored(spec, engine.state_tensors())
    state = checkpoint.load(source, entries, ranks, weights_only)
    session.say(f"resumed from {source}: step {state.step}, {state.samples:,} samples seen")
    return engine, state


def _place(session: Session) -> list[object]:
    """Return the place in a stream of data at which the checkpoint was saved. Collective."""
    source = session.start.source
    if source is None:
        return []
    description = session.ranks.on_first(lambda: checkpoint.read_description(source))
    place = description.get("place") or []
    return place[:2] if session.request.resume_anyway else place  # its files may have changed


def _loader(prepared: Prepared, session: Session, state: RunState) -> BatchLoader:
    subject = prepared.subject
    machine = session.machine
    return BatchLoader(
        subject.data.train,
        subject.task.collate,
        Batching.of(prepared.layout, machine.ranks.rank, machine.device, prepared.workers),
        range(state.step, prepared.steps),
        order=prepared.sample_order,
        position=state.samples,
    )


def _stopped(prepared: Prepared, session: Session, state: RunState) -> Stopped:
    """Return the error of a run that a signal ended; its copy is up to date. Collective."""
    try:
        session.copy_all(prepared.config.trainer.checkpoint)
    except DiskError as error:  # all is saved here, and the next start copies it
        session.say(f"note: {error}")
    # by all, since a launcher ends the others soon after the first has left
    number = session.ranks.highest_soon(session.signals.number)()
    return stopped_at(state.step, number)
