"""A run of the engine as `launch/train.py` makes it, and the record of each of its steps."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainer import checkpoint
from trainer.certify.outputs import Listener, Outputs
from trainer.certify.rounding import Rounded, measured
from trainer.certify.tiny_run import PROBE_RATE, Tiny
from trainer.data.loader import Batching, BatchLoader
from trainer.data.source import Source
from trainer.distributed.ranks import Ranks
from trainer.engines import ENGINES, Engine, EngineKind, Job, Metrics
from trainer.engines.engine import Machine, Observer
from trainer.models.spec import ModelSpec, stored
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import LRSchedule, Update, schedule_of
from trainer.run.evaluate import HeldOut, held_out_loss
from trainer.run.loop import Hooks, LoopPlan, train
from trainer.state import RunState
from trainer.supervise.phase import Phase
from trainer.tasks import cross_entropy
from trainer.tasks.task import Batch, Task

ROWS = 7
"""The number of tokens in a chunk of the loss, if the head's width allows so few."""

Tensors = dict[str, torch.Tensor]
State = dict[tuple[str, str], torch.Tensor]
"""Whole tensors by name and part: weights, masters, moments."""


@dataclass
class Recording:
    """The record of a run by steps; `states` has one more, from before training. Tensors are on the
    host.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    outputs: list[Outputs] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Targets of all steps so far, as logged."""
    held_out: dict[int, HeldOut] = field(default_factory=dict)
    """The evaluations, by steps done."""
    position: RunState = field(default_factory=RunState)
    """The position at the checkpoint, as it was written or read."""
    checkpoint: Path | None = None
    rounded: Rounded | None = None
    """The rounding of a language model in low precision."""


class Overflowing:
    """A task whose loss on one data rank is infinite in one step, which no rank may then take."""

    def __init__(self, task: Task, small: Tiny, data_rank: int) -> None:
        self._task = task
        self._step = small.overflow_step if data_rank == small.layout.data_ranks - 1 else None
        self._here = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def begin(self, step: int) -> None:
        self._here = step == self._step

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss = self._task.loss_sum(model, batch)
        return loss * math.inf if self._here else loss


class Recorder:
    """An engine that records its steps."""

    def __init__(self, engine: Engine, task: Overflowing, ranks: Ranks, observes: bool) -> None:
        self._engine = engine
        self._task = task
        self._ranks = ranks
        self._observes = observes
        self._listener = Listener(
            module.get_submodule("model") for module in engine.modules if observes
        )
        self.recording = Recording(states=[state_of(engine, ranks)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        update: Update,
        observe: Observer | None = None,
    ) -> Metrics:
        gradients: Tensors = {}
        self._task.begin(step)
        keep = lambda name, gradient: gradients.__setitem__(name, gradient.detach().cpu().clone())  # noqa: E731
        job = self._engine.job
        if not job.layout.sync_batch_norm:  # which one process runs as one micro-batch
            key = "input_ids" if job.spec.language.vocabulary else ""
            self._listener.begin(
                {(job.data_rank, i): batch.get(key) for i, batch in enumerate(micro_batches)}
            )
        metrics = self._engine.step(step, micro_batches, update, keep if self._observes else None)
        recording = self.recording
        recording.outputs.append(self._listener.end())
        recording.losses.append(float(metrics.loss()))
        recording.norms.append(float(metrics.gradient_norm))
        recording.skipped.append(metrics.skipped)
        recording.targets.append(int(metrics.targets))
        recording.gradients.append(gradients)
        recording.states.append(state_of(self._engine, self._ranks))
        return metrics


def engine_of(small: Tiny, device: str) -> str:
    """Choose the run's own engine: in float32, "auto" may choose another. Raises ConfigError if
    there is none.
    """
    wanted: str = small.config.trainer.engine
    if wanted == "auto":
        wanted, _ = small.own.engine(device=device)
    return replace(small.own, config=small.config, layout=small.layout).engine(wanted, device)[0]


class Sources(NamedTuple):
    """The samples of a run."""

    training: Source
    held_out: Source


@contextmanager
def shared_folder(ranks: Ranks) -> Iterator[Path]:
    """Make a folder on the first rank, removed at the end. Collective."""
    folder = Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="meshloom-verify-")))
    try:
        yield folder
    finally:
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)


def record(
    small: Tiny, spec: ModelSpec, task: Task, sources: Sources, machine: Machine, folder: Path
) -> tuple[Recording, Recording]:
    """Record the whole run; and its second part again, by a new engine, from the checkpoint in its
    middle. Collective.

    No step of the second run is observed, which shows that observing changes nothing.
    """
    section, layout, ranks = small.config.trainer, small.layout, machine.ranks
    kind = ENGINES[engine_of(small, machine.device.type)]
    ranks.on_each(lambda: kind.ready(layout, machine.device, small.config.deepspeed))
    ranks.on_first(lambda: kind.check(spec, layout))
    undecayed = spared(section.weight_decay_excludes, spec)
    task = Overflowing(task, small, layout.data_rank(ranks.rank))
    job = Job(layout, spec, task, small.config.deepspeed, section.seed, machine, undecayed)  # type: ignore[arg-type]
    with _chunks_of(max(1, max(ROWS, small.row // 8) * spec.language.vocabulary * 4)):
        whole = _train(small, kind, job, sources, folder, None)
        resumed = _train(small, kind, job, sources, folder, whole.checkpoint)
    return whole, resumed


def _train(
    small: Tiny, kind: EngineKind, job: Job, sources: Sources, folder: Path, source: Path | None
) -> Recording:
    """Train by the loop of a real run, from the checkpoint `source` on if there is one."""
    layout, spec, machine, ranks = job.layout, job.spec, job.machine, job.machine.ranks
    state, done = RunState(), 0 if source is None else small.total
    machine.watch.at(Phase.BUILDING, done + (2 if done else 0))
    # with other initial values, so that its whole state comes from the checkpoint
    engine = kind.build(job if source is None else replace(job, values_seed=job.seed + 1))
    if source is not None:
        engine.restore(checkpoint.read_description(source)["position"]["engine"])
        state = checkpoint.load(source, stored(job.spec, engine.state_tensors()), ranks)
    assert isinstance(job.task, Overflowing)
    recorder = Recorder(engine, job.task, ranks, observes=source is None)
    recording = recorder.recording
    recording.position = replace(state, engine=engine.scalars())
    batching = Batching.of(layout, ranks.rank, machine.device)

    class Records(Hooks):
        def log(self, state: RunState, metrics: Metrics, update: Update) -> None:
            recording.tokens.append(state.tokens)

        def evaluate(self, state: RunState) -> bool:
            given = sources.held_out, job.task, batching, small.held_out
            recording.held_out[state.step] = held_out_loss(engine, *given)
            return False

        def save(self, state: RunState) -> None:
            if source is None and state.step == small.middle:
                recording.position = replace(state, engine=engine.scalars())
                saved = (
                    folder / "checkpoints",
                    recording.position,
                    stored(spec, engine.state_tensors()),
                )
                recording.checkpoint = checkpoint.save(
                    *saved, {}, lambda _: None, ranks, stem=spec.files.stem
                )

        def at(self, phase: Phase, step: int) -> None:
            machine.watch.at(phase, done + step)  # what comes later has a higher step

    steps = range(state.step, small.total)
    loader = BatchLoader(
        sources.training, job.task.collate, batching, steps, seed=job.seed, position=state.samples
    )
    plan = LoopPlan(small.total, layout.train_batch, 1, small.middle, small.middle)
    with loader:
        train(recorder, loader, _schedule(small), plan, Records(), state)
    if source is None and layout.precision != "float32" and job.spec.tiny.input is None:
        name = engine_of(small, machine.device.type)
        recording.rounded = measured(engine, job, small, name, len(recording.losses))
    engine.close()
    return recording


def _schedule(small: Tiny) -> LRSchedule:
    """Return the config's schedule, followed by the probes, at a rate at which weight decay shows
    in float32.
    """
    optimizer, scheduler = small.config.optimizer, small.config.scheduler
    schedule = schedule_of(vars(optimizer), None if scheduler is None else vars(scheduler))
    return lambda step: (
        schedule(step) if step < small.steps else replace(schedule(step), learning_rate=PROBE_RATE)
    )


@contextmanager
def _chunks_of(size: int) -> Iterator[None]:
    """Split the loss of a few tokens into several chunks, as that of many is split."""
    real = cross_entropy.CHUNK_BYTES
    cross_entropy.CHUNK_BYTES = size
    try:
        yield
    finally:
        cross_entropy.CHUNK_BYTES = real


def state_of(engine: Engine, ranks: Ranks) -> State:
    """Gather all state tensors on the first rank: each is read on its owner and sent.
    Collective.
    """
    found: State = {}
    for entry in engine.state_tensors():
        value = entry.read()
        device = engine.job.machine.device
        value = (
            torch.empty(entry.shape, dtype=entry.dtype)
            if value is None
            else value.detach().clone().contiguous()
        )
        if ranks.world_size > 1:
            value = value.to(device)
            dist.broadcast(value, entry.owner)
        if ranks.first:  # the rank that compares them
            found[entry.name, entry.key] = value.cpu()
    return found
