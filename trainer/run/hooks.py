"""The hooks of the loop: metrics, evaluation, saves, and the question whether to stop."""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer import checkpoint
from trainer.data.dataset import check_alike
from trainer.data.loader import StepBatches
from trainer.data.stream import Stream
from trainer.distributed.ranks import Ranks
from trainer.engines import Engine, Machine, Metrics
from trainer.engines.devices import peak_of
from trainer.models.spec import given_tensors, stored
from trainer.optim.lr_schedules import Update
from trainer.recipe import Subject
from trainer.run import describe
from trainer.run.evaluate import held_out_loss, together
from trainer.run.loop import Hooks
from trainer.run.metrics import EpochLoss, Meter, Skipped
from trainer.run.prepare import Prepared
from trainer.run.start.folder import FINAL
from trainer.run.start.request import Start
from trainer.run.timeline import StepProfiler, Timeline
from trainer.run.vote import Vote
from trainer.state import RunState, StateTensor
from trainer.supervise.signals import Signals
from trainer.supervise.stall import Phase
from trainer.tasks.harness import scores
from trainer.trackers import Epoch, Evaluation, JsonLines, Record, Tracker, open_trackers, say
from trainer.trackers.callbacks import Callback, Callbacks

MERGED = "final-merged"
SLOW = 0.1
"""The share of the time spent waiting for data above which the user is told."""
SIGN_SECONDS = 600.0
"""Seconds without a line, after which one is printed that the run continues."""


@dataclass
class RunHooks(Hooks):
    """The hooks of a run, on every rank, with all that they write to, open within the context."""

    prepared: Prepared
    machine: Machine
    start: Start
    position: RunState
    engine: Engine
    console: Console
    signals: Signals
    trackers: Sequence[Tracker]
    """Those of every rank; the first has those of the config, too."""
    script: Sequence[Callback] = ()
    """A script's callbacks."""

    def __post_init__(self) -> None:
        prepared, ranks = self.prepared, self.machine.ranks
        section = prepared.config.trainer
        self.patience = Patience(section.evaluation.patience)
        samples = self.folder / "logs" / f"samples-rank-{ranks.rank}.jsonl"
        self._logs = JsonLines(samples) if section.log.sample_ids else None
        self._skipped = Skipped(ranks, watching=prepared.layout.precision != "float16")
        self._slow_data = SlowData(prepared)
        self._sign_of_life = SignOfLife(self.console, prepared.steps)
        self.callbacks = Callbacks(self.script, ranks)
        data = prepared.subject.data.train
        self._stream = data if isinstance(data, Stream) else None
        self._vote = Vote(ranks, self._stops, self._stream, prepared.plan, self.position)
        self._held_out: dict[int, float] = {}
        self._since = {"step": self.position.step, "samples": self.position.samples}

    def __enter__(self) -> RunHooks:
        prepared, ranks, folder = self.prepared, self.machine.ranks, self.folder
        section, first = prepared.config.trainer, ranks.first
        with ExitStack() as stack:
            self._trackers = list(self.trackers)
            if first:
                unit = prepared.subject.unit
                self._trackers += open_trackers(section.log.trackers, folder, self.console, unit)
            for tracker in self._trackers:
                stack.callback(tracker.close)
            self._background = None
            if section.checkpoint.asynchronous:
                self._background = stack.enter_context(checkpoint.Background(ranks.on_host()))
            at, source = self.position.step, self.start.source
            timeline = Timeline(folder if first else None, prepared.steps, at, source)
            self._timeline = stack.enter_context(timeline)
            self._profiler = None
            if section.profile is not None and first:
                self._profiler = StepProfiler(section.profile, folder, self.machine.device)
                stack.callback(self._profiler.close)
            device, layout = self.machine.device, prepared.layout
            sharers, flops = layout.world_size // layout.data_ranks, prepared.subject.flops(section)
            self._meter = Meter(
                prepared.steps, device, sharers, flops, peak_of(device), self.position
            )
            self._epoch = self._epoch_begun()
            self._garbage = stack.enter_context(Garbage())
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    @property
    def folder(self) -> Path:
        return self.start.folder

    def _epoch_begun(self) -> EpochLoss | None:
        """Return the loss so far of the epoch in progress; None without epochs. Collective."""
        if self.prepared.plan.epoch_samples is None:
            return None
        if (source := self.start.source) is None:
            return EpochLoss()
        known = self.machine.ranks.on_first(lambda: checkpoint.read_description(source))
        return EpochLoss(known.get("epoch"))

    def log(self, state: RunState, metrics: Metrics, update: Update) -> bool:
        for line in self._skipped.lines():
            say(self.console, line)
        by_source = self.prepared.subject.losses_by_source(metrics, self.machine.device)
        state = replace(state, engine=self.engine.scalars())
        record = self._meter.record(state, metrics, update, self._skipped.total)
        record = replace(record, by_source=by_source)
        for tracker in self._trackers:
            tracker.record(record)
        for line in self._slow_data.lines(record):
            say(self.console, line)
        return self.callbacks.call("on_log", record)

    def epoch(self, step: int, number: int) -> None:
        assert self._epoch is not None
        total, mean = self.prepared.plan.epochs, self._epoch.take()
        epoch = Epoch(step, mean, number=number, total=total)
        for tracker in self._trackers:
            tracker.epoch(epoch)

    def evaluate(self, state: RunState) -> bool:
        subject, limit = self.prepared.subject, self.prepared.config.trainer.evaluation.samples
        sources, given = subject.data.evaluations.items(), (limit, self.prepared.workers)
        by_source = {name: held_out_loss(self.engine, source, *given) for name, source in sources}
        if not by_source:
            return False
        found = together(list(by_source.values()))
        if math.isfinite(found.loss):
            self._held_out[state.step] = found.loss
        losses = {name: one.loss for name, one in by_source.items() if name}
        own, metrics = found.split()
        named: dict[str, Any] = {**own, **subject.measures(found.loss), "by_source": losses}
        metrics |= self._scores()
        evaluation = Evaluation(state.step, found.loss, found.targets, **named, metrics=metrics)
        for tracker in self._trackers:
            tracker.evaluation(evaluation)
        ends = self.patience.ends(state.step, found.loss)
        return self.callbacks.call("on_evaluate", evaluation) or ends

    def _scores(self) -> dict[str, float]:
        """Export the model and return its scores on the config's tasks. Collective."""
        section, folder = self.prepared.config.trainer, self.folder / "evaluated"
        if not section.evaluation.tasks:
            return {}
        ranks = self.machine.ranks
        self.machine.watch.moves(86_400.0)  # tasks give no sign of life
        export(self.prepared, self.engine, folder, ranks, merges=False)
        found = ranks.await_first(lambda: scores(folder / FINAL, section))
        ranks.on_node_firsts(lambda: shutil.rmtree(folder, ignore_errors=True))
        return found

    def save(self, state: RunState) -> None:
        prepared, subject = self.prepared, self.prepared.subject
        directory, kept = self.folder / "checkpoints", prepared.config.trainer.checkpoint
        moves = partial(self.machine.watch.moves, prepared.save_seconds)
        moves()
        if subject.check.goes_on:
            note = "note: the checkpoint waits until all prepared data has been compared"
            say(self.console, note)
        place = None if self._stream is None else self._stream.place(state.samples)
        position = replace(state, engine=self.engine.scalars())
        description = {
            **describe.run_description(prepared),
            "evaluation_loss": self._held_out.get(state.step),
            "since": self._since,
            "place": place,
            "epoch": None if self._epoch is None else self._epoch.sums(),
        }
        form = prepared.form
        files = partial(subject.save, dtype=form.dtype)

        def write(entries: Sequence[StateTensor], ranks: Ranks) -> None:
            # by collectives: the store ends with a launcher that holds it
            while ranks.any(subject.check.goes_on):
                moves()
                time.sleep(1.0)
            ranks.on_own(subject.check.refuse)
            if place is not None:
                check_alike(ranks, place, "trainer.data.stream")
            checkpoint.save(directory, position, entries, description, files, ranks, form)
            upload = self.start.upload if ranks.first else None
            remove = partial(checkpoint.prune, directory) if upload is None else upload.prune
            ranks.on_node_firsts(lambda: remove(kept.keep_last, kept.keep_best) and None)
            if upload is not None:
                upload.soon(partial(say, self.console))

        entries = stored(subject.spec, self.engine.state_tensors())
        if self._background is None:
            write(entries, self.machine.ranks)
        else:
            self._background.save(entries, write)
        self.callbacks.call("on_save", state.step)

    def on_step(self, batches: StepBatches, metrics: Metrics) -> None:
        self._meter.note(batches)
        self._skipped.note(batches, metrics)
        if self._epoch is not None:
            self._epoch.note(metrics)
        if self._logs is not None:
            ids = [int(i) for part in batches.ids for i in part]
            self._logs.write({"step": batches.step, "rank": self.machine.ranks.rank, "ids": ids})
        self.callbacks.call("on_step_end", batches.step + 1)

    def stop(self, step: int) -> Callable[[], bool]:
        stops = self._vote.begin(step + 1)
        return lambda: stops() or self.callbacks.ended

    def wait(self, step: int) -> bool:
        before = self._vote.paused_seconds
        stops = self._vote.wait(step)
        self._meter.waited += self._vote.paused_seconds - before
        return stops

    def _stops(self) -> bool:
        return self.signals.received or self.prepared.subject.check.failed

    def at(self, phase: Phase, step: int) -> None:
        steps = self.prepared.steps
        self.machine.watch.at(phase, step)
        self.machine.signs.at_step(min(step, steps), steps, phase)
        self._sign_of_life.at(phase, step)
        if self._profiler is not None:
            self._timeline.at(Phase.PROFILING, step)
            self._profiler.at(phase, step)
        self._timeline.at(phase, step)
        self._garbage.at(phase, step)


class Garbage:
    """Collects Python's garbage between steps, at the same ones on each rank, and not when
    allocations happen to reach a threshold: the pause of any rank is one of all."""

    EVERY = 50

    def __enter__(self) -> Garbage:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()  # the model, the libraries: they stay, and are not looked through again
        gc.disable()
        return self

    def __exit__(self, *error: Any) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def at(self, phase: Phase, step: int) -> None:
        """Collect before an evaluation or a save, and before every 50th step."""
        every = phase is Phase.WAITING and step % self.EVERY == 0
        if every or phase in (Phase.EVALUATING, Phase.SAVING):
            gc.collect()


class Patience:
    """Ends a run after so many evaluations in a row without a lower held-out loss
    (`trainer.evaluation.patience`).

    A resumed run starts counting again.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lowest, self._at, self._since = math.inf, 0, 0

    def ends(self, step: int, loss: float) -> bool:
        """Return True if this evaluation was one too many; the same on every rank."""
        if loss < self._lowest:
            self._lowest, self._at, self._since = loss, step, 0
        else:
            self._since += 1
        return self.line is not None

    @property
    def line(self) -> str | None:
        """The reason for which it has ended the run, for the user; None before."""
        if self._limit is None or self._since < self._limit:
            return None
        lowest = f"the lowest was {self._lowest:.4g}, after step {self._at}"
        return f"stopped: the held-out loss has not fallen in {self._since} evaluations; {lowest}"


class SignOfLife:
    """Prints the step in progress, without a terminal and where logged steps are far apart."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._spoken = console, steps, time.monotonic()

    def at(self, phase: Phase, step: int) -> None:
        now = time.monotonic()
        silent = not self._console.is_terminal and now - self._spoken > SIGN_SECONDS
        if phase is Phase.TRAINING and silent:
            self._spoken = now
            say(self._console, f"step {step}/{self._steps} is running")
        elif phase in (Phase.LOGGING, Phase.EVALUATING):
            self._spoken = now


class SlowData:
    """A note, given once, that the device waits for data, with what would help."""

    def __init__(self, prepared: Prepared) -> None:
        self._advice = prepared.subject.loading_advice(prepared.workers)
        self._logged, self._noted = 0, False

    def lines(self, record: Record) -> Iterator[str]:
        self._logged += 1
        # the first steps wait for the start
        if record.data_wait > SLOW and self._logged > 1 and not self._noted:
            self._noted = True
            waits = f"{record.data_wait:.0%} of the time is spent waiting for data"
            yield f"note: {waits}: the loader is slower than the device{self._advice}"


def export(
    prepared: Prepared, engine: Engine, folder: Path, ranks: Ranks, merges: bool = True
) -> None:
    """Write the model to `final/`; with its adapter merged, to `final-merged/`. Collective."""
    form = replace(prepared.form, one_file=prepared.subject.spec.one_file)
    export_model(prepared.subject, engine, folder, ranks, form, merges)


def export_model(
    subject: Subject,
    engine: Engine,
    folder: Path,
    ranks: Ranks,
    form: checkpoint.ModelForm,
    merges: bool = True,
) -> None:
    """Write what is trained, in this form, as `export` does. Collective."""
    spec, final = subject.spec, folder / FINAL
    entries = stored(spec, engine.state_tensors())
    checkpoint.export(final, entries, partial(subject.save, dtype=form.dtype), ranks, form)
    if merges and spec.files.merged is not None:
        merged = spec.files.merged(final)
        files = partial(replace(subject, spec=merged).save, dtype=form.dtype)
        entries = given_tensors(merged, ranks)
        form = checkpoint.ModelForm(form.dtype, hash=form.hash)
        checkpoint.export(folder / MERGED, entries, files, ranks, form)


def finish(prepared: Prepared, folder: Path, console: Console) -> None:
    """Show a sample of the trained model, and say where it is."""
    subject = prepared.subject
    if (text := subject.example(folder / "final", prepared.config.trainer)) is not None:
        say(console, "sample  " + "\n        ".join(text.splitlines()))
    say(console, f"done: {folder / 'final'} opens with {subject.spec.files.opens}")
    if subject.spec.files.merged is not None:
        say(console, f"merged: {folder / MERGED} opens with AutoModelForCausalLM.from_pretrained")
