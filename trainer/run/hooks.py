"""The hooks of the loop: metrics, evaluation, saves, and the question whether to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from trainer import checkpoint
from trainer.data.loader import Batching, StepBatches
from trainer.distributed.ranks import Ranks
from trainer.engines import Engine, Machine, Metrics
from trainer.models.spec import given_tensors, stored
from trainer.optim.lr_schedules import Update
from trainer.run import describe
from trainer.run.evaluate import held_out_loss, together
from trainer.run.loop import Hooks
from trainer.run.metrics import Meter, Skipped
from trainer.run.prepare import Prepared
from trainer.state import RunState, StateTensor
from trainer.supervise.phase import Phase
from trainer.supervise.signals import NoSignals, StopSignals
from trainer.trackers import Evaluation, Record, SampleLog, Tracker, say

MERGED = "final-merged"
SLOW = 0.1
"""The share of the time spent waiting for data above which the user is told."""
SIGN_SECONDS = 600.0
"""Seconds without a line, after which one is printed if nothing else shows that the run
continues.
"""
SLOW_DISK = 50e6
"""The lowest speed, in bytes/s, assumed for a save: at that speed its time without a sign of life
is no hang.
"""
Saver = Callable[[Sequence[StateTensor], Callable[[Sequence[StateTensor], Ranks], None]], None]
"""Saves state tensors by the given function, called with the ranks to agree with: at once, or in
the background.
"""


@dataclass
class RunHooks(Hooks):
    """The hooks of a run, on every rank; only rank 0 has trackers."""

    prepared: Prepared
    machine: Machine
    folder: Path
    engine: Engine
    meter: Meter
    trackers: Sequence[Tracker]
    console: Console
    saver: Saver
    signals: StopSignals | NoSignals
    watchers: Sequence[Callable[[Phase, int], None]] = ()
    """Called as `at` is."""

    def __post_init__(self) -> None:
        prepared, ranks, state = self.prepared, self.machine.ranks, self.meter.state
        section = prepared.config.trainer
        self.patience = Patience(section.evaluation.patience)
        self._samples = (
            SampleLog(self.folder / "logs", ranks.rank) if section.log.sample_ids else None
        )
        self._skipped = Skipped(ranks, watching=prepared.layout.precision != "float16")
        self._slow_data = SlowData(prepared)
        self._sign_of_life = SignOfLife(self.console, prepared.steps)
        self._on_host = ranks.on_host()
        self._held_out: dict[int, float] = {}
        self._since = {"step": state.step, "samples": state.samples}

    def log(self, state: RunState, metrics: Metrics, update: Update) -> None:
        for line in self._skipped.lines():
            say(self.console, line)
        by_source = self.prepared.subject.losses_by_source(metrics, self.machine.device)
        state = replace(state, engine=self.engine.scalars())
        record = replace(
            self.meter.record(state, metrics, update, self._skipped.total), by_source=by_source
        )
        for tracker in self.trackers:
            tracker.record(record)
        for line in self._slow_data.lines(record):
            say(self.console, line)

    def evaluate(self, state: RunState) -> bool:
        subject, layout, machine = self.prepared.subject, self.prepared.layout, self.machine
        limit = self.prepared.config.trainer.evaluation.samples
        batching = Batching.of(layout, machine.ranks.rank, machine.device, self.prepared.workers)
        given = (subject.task, batching, limit, machine.watch.moves)
        by_source = {
            name: held_out_loss(self.engine, source, *given)
            for name, source in subject.data.evaluations.items()
        }
        if not by_source:
            return False
        found = together(list(by_source.values()))
        if math.isfinite(found.loss):
            self._held_out[state.step] = found.loss
        losses = {name: one.loss for name, one in by_source.items() if name}
        measures = found.measures | subject.measures(found.loss)
        for tracker in self.trackers:
            tracker.evaluation(
                Evaluation(state.step, found.loss, found.targets, **measures, by_source=losses)
            )
        return self.patience.ends(state.step, found.loss)

    def save(self, state: RunState) -> None:
        prepared, spec = self.prepared, self.prepared.subject.spec
        directory, kept = self.folder / "checkpoints", prepared.config.trainer.checkpoint
        moves = partial(self.machine.watch.moves, saved_bytes(prepared) / SLOW_DISK)
        moves()
        if prepared.subject.check.goes_on:
            say(
                self.console, "note: the checkpoint waits until all prepared data has been compared"
            )
        position = replace(state, engine=self.engine.scalars())
        description = {
            **describe.run_description(prepared),
            "evaluation_loss": self._held_out.get(state.step),
            "since": self._since,
        }

        def write(entries: Sequence[StateTensor], agreeing: Ranks) -> None:
            files, dtype = partial(write_model_files, prepared), stored_dtype(prepared)
            agreeing.await_each(lambda: prepared.subject.check.wait(moves))
            checkpoint.save(
                directory, position, entries, description, files, agreeing, dtype, spec.files.stem
            )
            agreeing.on_keepers(lambda: checkpoint.prune(directory, kept.keep_last, kept.keep_best))

        self.saver(stored(spec, self.engine.state_tensors()), write)

    def on_step(self, batches: StepBatches, metrics: Metrics) -> None:
        self._skipped.note(batches, metrics)
        if self._samples is not None:
            self._samples.write(batches.step, [int(i) for part in batches.ids for i in part])

    def stop(self) -> Callable[[], bool]:
        return self._on_host.any_soon(self.signals.received or self.prepared.subject.check.failed)

    def at(self, phase: Phase, step: int) -> None:
        steps = self.prepared.steps
        self.machine.watch.at(phase, step)
        self.machine.signs.at_step(min(step, steps), steps, phase)
        self._sign_of_life.at(phase, step)
        for watcher in self.watchers:
            watcher(phase, step)


class Patience:
    """Ends a run after so many evaluations in a row without a lower held-out loss
    (`trainer.evaluation.patience`).

    A resumed run starts counting anew.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lowest, self._at, self._since = math.inf, 0, 0

    def ends(self, step: int, loss: float) -> bool:
        """Return True if this evaluation was one too many. The same on every rank, as the loss
        is.
        """
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


def saved_bytes(prepared: Prepared) -> int:
    """Return the bytes of a checkpoint: weights, and float32 masters and two moments of trained
    parameters.
    """
    spec = prepared.subject.spec
    weights = prepared.learned if spec.training.unsaved else spec.parameters
    return 4 * weights + 12 * prepared.learned


class SignOfLife:
    """Prints now and then which step is in progress, without a terminal and if logged steps are far
    apart.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._spoken = console, steps, time.monotonic()

    def at(self, phase: Phase, step: int) -> None:
        now = time.monotonic()
        if (
            phase is Phase.TRAINING
            and not self._console.is_terminal
            and now - self._spoken > SIGN_SECONDS
        ):
            self._spoken = now
            say(self._console, f"step {step}/{self._steps} is made")
        elif phase in (Phase.LOGGING, Phase.EVALUATING):
            self._spoken = now


class SlowData:
    """A note, given once, that the device waits for data, with what would help."""

    def __init__(self, prepared: Prepared) -> None:
        self._advice = prepared.subject.loading_advice(prepared.workers)
        self._logged, self._noted = 0, False

    def lines(self, record: Record) -> Iterator[str]:
        self._logged += 1
        if (
            record.data_wait > SLOW and self._logged > 1 and not self._noted
        ):  # the first steps wait for the start
            self._noted = True
            yield (
                f"note: {record.data_wait:.0%} of the time goes by waiting for data: the loader is "
                "slower than the "
                f"device{self._advice}"
            )


def stored_dtype(prepared: Prepared) -> torch.dtype | None:
    name = prepared.config.trainer.checkpoint.dtype
    return getattr(torch, name) if name else None


def write_model_files(prepared: Prepared, target: Path) -> None:
    prepared.subject.spec.files.save_config(target, stored_dtype(prepared))
    prepared.subject.save(target)


def export(prepared: Prepared, engine: Engine, folder: Path, ranks: Ranks) -> None:
    """Write the model to `final/`; with its adapter merged, to `final-merged/`. Collective."""
    spec, dtype, final = prepared.subject.spec, stored_dtype(prepared), folder / "final"
    weights, files = stored(spec, engine.state_tensors()), partial(write_model_files, prepared)
    checkpoint.export(final, weights, files, ranks, dtype, spec.files.stem, spec.one_file)
    if spec.files.merged is not None:
        merged = spec.files.merged(final)
        files = partial(
            write_model_files, replace(prepared, subject=replace(prepared.subject, spec=merged))
        )
        checkpoint.export(folder / MERGED, given_tensors(merged, ranks), files, ranks, dtype)


def finish(prepared: Prepared, folder: Path, console: Console) -> None:
    subject = prepared.subject
    if (text := subject.example(folder / "final", prepared.config.trainer)) is not None:
        say(console, describe.framed_sample(text))
    say(console, f"done: {folder / 'final'} opens with {subject.spec.files.opens}")
    if subject.spec.files.merged is not None:
        say(console, f"merged: {folder / MERGED} opens with AutoModelForCausalLM.from_pretrained")
