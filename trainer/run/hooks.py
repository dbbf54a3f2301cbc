"""The hooks of the loop: metrics, evaluation, saves, and the question whether to stop."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from trainer import checkpoint
from trainer.data.dataset import check_alike
from trainer.data.loader import StepBatches
from trainer.data.stream import Stream
from trainer.distributed.ranks import Ranks
from trainer.engines import Engine, Metrics
from trainer.engines.devices import peak_of
from trainer.models.spec import stored
from trainer.optim.lr_schedules import Update
from trainer.run import describe
from trainer.run.evaluate import held_out_loss, together
from trainer.run.final import export
from trainer.run.loop import Hooks
from trainer.run.observers.host import Garbage
from trainer.run.observers.metrics import EpochLoss, Meter, Skipped
from trainer.run.observers.notices import Patience, SignOfLife, SlowData
from trainer.run.observers.timeline import StepProfiler, Timeline
from trainer.run.prepare import Prepared
from trainer.run.session import Session
from trainer.run.start.folder import FINAL
from trainer.run.vote import Vote
from trainer.state import RunState, StateTensor
from trainer.supervise.stall import Phase
from trainer.tasks.harness import scores
from trainer.trackers import Epoch, JsonLines, open_trackers
from trainer.trackers.callbacks import Callbacks


class RunHooks(Hooks):
    """The hooks of a run, on every rank, with all that they write to, open within the context."""

    def __init__(
        self, prepared: Prepared, session: Session, engine: Engine, position: RunState
    ) -> None:
        section = prepared.config.trainer
        ranks = session.ranks
        self._prepared = prepared
        self._session = session
        self._engine = engine
        self._position = position
        self._say = session.say
        self._patience = Patience(section.evaluation.patience)
        samples = session.folder / "logs" / f"samples-rank-{ranks.rank}.jsonl"
        self._logs = JsonLines(samples) if section.log.sample_ids else None
        self._skipped = Skipped(ranks, watching=prepared.layout.precision != "float16")
        self._slow_data = SlowData(prepared.subject.loading_advice(prepared.workers))
        self._sign_of_life = SignOfLife(session.console, prepared.steps)
        self.callbacks = Callbacks(session.request.callbacks, ranks)
        data = prepared.subject.data.train
        self._stream = data if isinstance(data, Stream) else None
        self._vote = Vote(ranks, self._stops, self._stream, prepared.plan, position)
        self._held_out: dict[int, float] = {}
        self._since = {"step": position.step, "samples": position.samples}

    def __enter__(self) -> RunHooks:
        prepared = self._prepared
        session = self._session
        ranks = self._session.ranks
        section = prepared.config.trainer
        subject = prepared.subject
        folder = session.folder
        device = session.machine.device
        with ExitStack() as stack:
            self._trackers = list(session.trackers)
            if ranks.first:
                named = section.log.trackers
                self._trackers += open_trackers(named, folder, session.console, subject.unit)
            for tracker in self._trackers:
                stack.callback(tracker.close)
            self._background = None
            if section.checkpoint.asynchronous:
                self._background = stack.enter_context(checkpoint.Background(ranks.on_host()))
            begun = self._position.step, session.start.source
            timeline = Timeline(folder if ranks.first else None, prepared.steps, *begun)
            self._timeline = stack.enter_context(timeline)
            self._profiler = None
            if section.profile is not None and ranks.first:
                self._profiler = StepProfiler(section.profile, folder, device)
                stack.callback(self._profiler.close)
            self._meter = Meter(
                prepared.steps,
                device,
                prepared.layout.world_size // prepared.layout.data_ranks,
                subject.flops(section),
                peak_of(device),
                self._position,
            )
            self._epoch = self._epoch_begun()
            self._garbage = stack.enter_context(Garbage())
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    @property
    def ended_early(self) -> str | None:
        """The reason for which the run ended before its last step, unless a signal did that."""
        by_callback = "stopped: a callback has ended the run" if self.callbacks.ended else None
        return self._patience.line or by_callback

    def _epoch_begun(self) -> EpochLoss | None:
        """Return the loss so far of the epoch in progress; None without epochs. Collective."""
        if self._prepared.plan.epoch_samples is None:
            return None
        if (source := self._session.start.source) is None:
            return EpochLoss()
        known = self._session.ranks.on_first(lambda: checkpoint.read_description(source))
        return EpochLoss(known.get("epoch"))

    def log(self, state: RunState, metrics: Metrics, update: Update) -> bool:
        for line in self._skipped.lines():
            self._say(line)
        subject = self._prepared.subject
        device = self._session.machine.device
        by_source = subject.losses_by_source(metrics, device)
        figures = subject.training_figures(metrics, device)
        state = replace(state, engine=self._engine.scalars())
        record = self._meter.record(state, metrics, update, self._skipped.total)
        record = replace(record, by_source=by_source, metrics=figures)
        for tracker in self._trackers:
            tracker.record(record)
        for line in self._slow_data.lines(record):
            self._say(line)
        return self.callbacks.call("on_log", record)

    def epoch(self, step: int, number: int) -> None:
        assert self._epoch is not None
        total = self._prepared.plan.epochs
        mean = self._epoch.take()
        epoch = Epoch(step, mean, number=number, total=total)
        for tracker in self._trackers:
            tracker.epoch(epoch)

    def evaluate(self, state: RunState) -> bool:
        subject = self._prepared.subject
        limit = self._prepared.config.trainer.evaluation.samples
        sources = subject.data.evaluations.items()
        given = (limit, self._prepared.workers)
        by_source = {name: held_out_loss(self._engine, source, *given) for name, source in sources}
        if not by_source:
            return False
        result = together(list(by_source.values()))
        if math.isfinite(result.loss):
            self._held_out[state.step] = result.loss
        losses = {name: one.loss for name, one in by_source.items() if name}
        result = result._replace(measures=subject.figures(result.measures))
        more = subject.measures(result.loss) | self._scores()
        evaluation = result.evaluation(state.step, losses, more)
        for tracker in self._trackers:
            tracker.evaluation(evaluation)
        ends = self._patience.ends(state.step, result.loss)
        return self.callbacks.call("on_evaluate", evaluation) or ends

    def _scores(self) -> dict[str, float]:
        """Export the model and return its scores on the config's tasks. Collective."""
        section = self._prepared.config.trainer
        folder = self._session.folder / "evaluated"
        if not section.evaluation.tasks:
            return {}
        ranks = self._session.ranks
        self._session.machine.watch.moves(86_400.0)  # tasks give no sign of life
        form = self._prepared.exported_form
        export(self._prepared.subject, self._engine, folder, ranks, form, merges=False)
        result = ranks.await_first(lambda: scores(folder / FINAL, section))
        ranks.on_node_firsts(lambda: shutil.rmtree(folder, ignore_errors=True))
        return result

    def save(self, state: RunState) -> None:
        prepared = self._prepared
        subject = self._prepared.subject
        directory = self._session.folder / "checkpoints"
        kept = prepared.config.trainer.checkpoint
        moves = partial(self._session.machine.watch.moves, prepared.save_seconds)
        moves()
        if subject.check.goes_on:
            note = "note: the checkpoint waits until all prepared data has been compared"
            self._say(note)
        place = None if self._stream is None else self._stream.place(state.samples)
        position = replace(state, engine=self._engine.scalars())
        description = {
            **describe.run_description(prepared),
            "evaluation_loss": self._held_out.get(state.step),
            "since": self._since,
            "place": place,
            "epoch": None if self._epoch is None else self._epoch.sums(),
        }
        files = partial(subject.save, dtype=prepared.form.dtype)
        model = checkpoint.ModelFolder(files, prepared.form)

        def write(entries: Sequence[StateTensor], ranks: Ranks) -> None:
            # by collectives: the store ends with a launcher that holds it
            while ranks.any(subject.check.goes_on):
                moves()
                time.sleep(1.0)
            ranks.on_own(subject.check.refuse)
            if place is not None:
                check_alike(ranks, place, "trainer.data.stream")
            checkpoint.save(directory, position, entries, description, model, ranks)
            upload = self._session.start.upload if ranks.first else None
            remove = partial(checkpoint.prune, directory) if upload is None else upload.prune
            ranks.on_node_firsts(lambda: remove(kept.keep_last, kept.keep_best))
            if upload is not None:
                upload.soon(self._say)

        if self._background is None:
            write(self._entries(), self._session.ranks)
        else:
            self._background.save(self._entries(), write)
        self.callbacks.call("on_save", state.step)

    def _entries(self) -> Sequence[StateTensor]:
        return stored(self._prepared.subject.spec, self._engine.state_tensors())

    def on_step(self, batches: StepBatches, metrics: Metrics) -> None:
        self._meter.note(batches)
        self._skipped.note(batches, metrics)
        if self._epoch is not None:
            self._epoch.note(metrics)
        if self._logs is not None:
            ids = [int(i) for part in batches.ids for i in part]
            self._logs.write({"step": batches.step, "rank": self._session.ranks.rank, "ids": ids})
        if self._background is not None:
            self._background.reserve(self._entries)  # the optimizer has its state by now
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
        return self._session.signals.received or self._prepared.subject.check.failed

    def at(self, phase: Phase, step: int) -> None:
        steps = self._prepared.steps
        self._session.machine.watch.at(phase, step)
        self._session.machine.signs.at_step(min(step, steps), steps, phase)
        self._sign_of_life.at(phase, step)
        if self._profiler is not None:
            self._timeline.at(Phase.PROFILING, step)
            self._profiler.at(phase, step)
        self._timeline.at(phase, step)
        self._garbage.at(phase, step)
