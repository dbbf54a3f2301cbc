"""A run of the engine as `launch/train.py` makes it, and the record of each of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer import checkpoint
from trainer.certify.one_process import quantising
from trainer.certify.one_process.edges import Edge, samples_at
from trainer.certify.outputs import Listener, Outputs, Tokens
from trainer.certify.patches import loss_in_chunks
from trainer.certify.rounding import Rounded, measured, recording_into
from trainer.certify.tiny_run import PROBE_RATE, Tiny, engine_of
from trainer.config.sections.adapter import QuantizeSection
from trainer.data.loader import Batching, BatchLoader
from trainer.data.mixture import Source
from trainer.data.order import SampleOrder
from trainer.engines import ENGINES, Engine, Job, Metrics
from trainer.engines.engine import Machine
from trainer.models.finetuning.quantised.quantised_base import quantised_weights
from trainer.models.spec import stored
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import LRSchedule, Update, schedule_of
from trainer.parallel.parallel_mesh import division_of
from trainer.recipe import Subject
from trainer.run.evaluate import HeldOut, held_out_loss
from trainer.run.final import export
from trainer.run.loop import Hooks, LoopPlan, train
from trainer.state import WEIGHT, RunState
from trainer.supervise.stall import Phase
from trainer.tasks.mixers import runs_by_document
from trainer.tasks.task import Batch, Task

ROWS = 7
"""The number of tokens in a chunk of the loss, if the head's width allows so few."""

Inputs = Any
"""The inputs of a micro-batch; the reference that makes them knows their type."""
Targets = Any
"""Its targets, likewise."""
Tensors = dict[str, torch.Tensor]
State = dict[tuple[str, str], torch.Tensor]
"""Whole tensors by name and part: weights, masters, moments."""


@dataclass(frozen=True)
class Written:
    """The files of a run, and the position at its checkpoint."""

    position: RunState = field(default_factory=RunState)
    """The position at the checkpoint, as it was written or read."""
    checkpoint: Path | None = None
    exported: Path | None = None
    """The folder with `final/` and `final-merged/`, if the model has an adapter."""


@dataclass
class Recording:
    """The record of a run by steps, on the host; `states` has one more, from before training."""

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
    written: Written = field(default_factory=Written)
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

    def __init__(self, engine: Engine, task: Overflowing, recording: Recording, observes: bool):
        self._engine = engine
        self._task = task
        self._recording = recording
        self._observes = observes
        modules = [module.get_submodule("model") for module in engine.modules if observes]
        self._listener = Listener(modules, _closed(modules, engine.job))
        recording.states.append(state_of(engine))

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self, step: int, micro_batches: Sequence[Batch], update: Update) -> Metrics:
        gradients: Tensors = {}
        self._task.begin(step)
        if not self._engine.job.layout.sync_batch_norm:  # one process runs others
            self._listener.begin(self._tokens(micro_batches))
        keep = recording_into(gradients) if self._observes else None
        metrics = self._engine.step(step, micro_batches, update, keep)
        recording = self._recording
        recording.outputs.append(self._listener.end())
        recording.losses.append(float(metrics.loss()))
        recording.norms.append(float(metrics.gradient_norm))
        recording.skipped.append(metrics.skipped)
        recording.targets.append(int(metrics.targets))
        recording.gradients.append(gradients)
        recording.states.append(state_of(self._engine))
        return metrics

    def _tokens(self, micro_batches: Sequence[Batch]) -> list[Tokens]:
        """Return the tokens that this rank has of each micro-batch."""
        job = self._engine.job
        layout = job.layout
        part = job.machine.ranks.rank // job.layout.tensor % job.layout.context
        place = job.data_rank * layout.context + part
        if not job.spec.language.vocabulary:
            return [{(place, number): None} for number in range(len(micro_batches))]
        if layout.pipeline > 1 or job.one_width:  # parts are those of rows of one length
            micro_batches = job.task.padded(micro_batches)
        part_of = division_of(layout, job.spec.language.attention.heads).part
        rows = enumerate(micro_batches)
        # a sample may be several rows of tokens
        ids = [(n, batch["input_ids"].flatten(0, -2)) for n, batch in rows]
        return [{(place, n): part_of(of, part)} for n, of in ids]


def _closed(modules: Sequence[nn.Module], job: Job) -> list[str]:
    """Return the names of modules inside which nothing can be compared with one process.

    No hook can be compiled with a block. Under context parallelism, a layer with state has whole
    documents, of any rank's tokens.
    """
    names = list(job.spec.blocks) if job.layout.compile == "blocks" else []
    pairs = [pair for module in modules for pair in module.named_modules()]
    by_document = [name for name, module in pairs if runs_by_document(module)]
    return names + by_document if job.layout.context > 1 else names


class RecordingHooks(Hooks):
    """Hooks that record logs and evaluations and, if `saves`, the checkpoint in the middle."""

    def __init__(
        self, engine: Engine, recording: Recording, small: Tiny, samples: Source, saves: Path | None
    ) -> None:
        self._engine = engine
        self._recording = recording
        self._small = small
        self._samples = samples
        self._saves = saves
        self._first_step = 0 if saves else small.total

    def log(self, state: RunState, metrics: Metrics, update: Update) -> None:
        self._recording.tokens.append(state.tokens)

    def evaluate(self, state: RunState) -> bool:
        result = held_out_loss(self._engine, self._samples, self._small.held_out)
        self._recording.held_out[state.step] = result
        return False

    def save(self, state: RunState) -> None:
        if self._saves is None or state.step != self._small.middle:
            return
        job = self._engine.job
        position = replace(state, engine=self._engine.scalars())
        entries = stored(job.spec, self._engine.state_tensors())
        model = checkpoint.ModelFolder(form=checkpoint.ModelForm(stem=job.spec.files.stem))
        ranks = job.machine.ranks
        path = checkpoint.save(self._saves, position, entries, {}, model, ranks)
        self._recording.written = Written(position, path)

    def at(self, phase: Phase, step: int) -> None:
        # what comes later has a higher step
        self._engine.job.machine.watch.at(phase, self._first_step + step)


class Sources(NamedTuple):
    """The samples of a run."""

    training: Source
    held_out: Source


class Recorded(NamedTuple):
    """The recordings of a whole run and of its second part, and the engine of both."""

    engine_name: str
    whole: Recording
    resumed: Recording


def record(
    small: Tiny,
    subject: Subject,
    sources: Sources,
    machine: Machine,
    folder: Path,
    edges: Sequence[Edge] = (),
) -> Recorded:
    """Record the whole run, with a step at learning rate 0 for each of the `edges`; and its second
    part again, by a new engine, from the checkpoint in its middle. Collective.

    No step of the second run is observed, which shows that observing changes nothing.
    """
    section = small.config.trainer
    layout = small.layout
    spec = subject.spec
    ranks = machine.ranks
    name = ranks.on_first(lambda: engine_of(small, machine.device.type, spec))
    kind = ENGINES[name]
    ranks.on_each(lambda: kind.ready(layout, machine.device, small.config.deepspeed))
    undecayed = spared(section.weight_decay_excludes, spec)
    overflowing: Any = Overflowing(subject.task, small, layout.data_rank(ranks.rank))
    deepspeed = small.config.deepspeed
    job = Job(layout, spec, overflowing, deepspeed, section.seed, machine, undecayed)
    chunk = max(1, max(ROWS, small.row // 8) * spec.language.vocabulary * 4)
    with loss_in_chunks(chunk):
        machine.watch.at(Phase.BUILDING)
        engine = kind.build(job)
        subject.before_training(engine, folder, 0)
        whole = _train(small, engine, sources, RunState(), folder / "checkpoints", edges)
        if small.low_precision and spec.tiny.input is None and subject.counts_tokens:
            whole = replace(whole, rounded=measured(engine, small, name, len(whole.losses)))
        if section.adapter is not None:
            exported = _exported(engine, subject, folder / "exported")
            whole = replace(whole, written=replace(whole.written, exported=exported))
        engine.close()
        assert whole.written.checkpoint is not None
        machine.watch.at(Phase.BUILDING, small.total + 2)
        # with other initial values, so that its whole state comes from the checkpoint
        engine = kind.build(replace(job, values_seed=job.seed + 1))
        engine.restore(checkpoint.read_description(whole.written.checkpoint)["position"]["engine"])
        entries = stored(spec, engine.state_tensors())
        position = checkpoint.load(whole.written.checkpoint, entries, ranks)
        resumed = _train(small, engine, sources, position, None)
        engine.close()
    return Recorded(name, whole, resumed)


def _exported(engine: Engine, subject: Subject, folder: Path) -> Path:
    """Write the adapter as a run does at its end, merged if it is to be. Collective."""
    job = engine.job
    ranks = engine.job.machine.ranks
    ranks.on_first(folder.mkdir)
    form = checkpoint.ModelForm(stem=job.spec.files.stem)
    export(subject, engine, folder, ranks, form)
    return folder


def _train(
    small: Tiny,
    engine: Engine,
    sources: Sources,
    state: RunState,
    saves: Path | None,
    edges: Sequence[Edge] = (),
) -> Recording:
    """Train from `state` by the loop of a real run; the whole run `saves` a checkpoint."""
    job: Any = engine.job
    layout = job.layout
    machine = job.machine
    recording = Recording(written=Written(replace(state, engine=engine.scalars())))
    recorder: Any = Recorder(engine, job.task, recording, observes=saves is not None)
    batching = Batching.of(layout, machine.ranks.rank, machine.device)
    loader = BatchLoader(
        sources.training,
        job.task.collate,
        batching,
        range(state.step, small.total),
        order=SampleOrder(job.seed),
        position=state.samples,
    )
    plan = LoopPlan(small.total, layout.train_batch, 1, small.middle, small.middle)
    hooks = RecordingHooks(engine, recording, small, sources.held_out, saves)
    with loader:
        train(recorder, loader, _schedule(small), plan, hooks, state)
    for step, edge in enumerate(edges, small.total):
        recorder.step(step, _batches_at(edge, job, small, step), Update(0.0))
    return recording


def _batches_at(edge: Edge, job: Job, small: Tiny, step: int) -> list[Batch]:
    """Return this rank's micro-batches of a step at an edge."""
    batches = []
    for number in range(small.layout.accumulation):
        place = step, job.data_rank, number
        batch = job.task.collate(samples_at(edge, small, job.spec.language.vocabulary, place))
        batches.append({name: value.to(job.machine.device) for name, value in batch.items()})
    return batches


def _schedule(small: Tiny) -> LRSchedule:
    """Return the config's schedule, followed by the probes, at PROBE_RATE."""
    schedule = schedule_of(small.config.settings)

    def probing(step: int) -> Update:
        update = schedule(step)
        return update if step < small.steps else replace(update, learning_rate=PROBE_RATE)

    return probing


def state_of(engine: Engine) -> State:
    """Return all state tensors, whole, on the first rank, which compares them. Collective.

    Quantised weights are read by the certificate's own code.
    """
    ranks = engine.job.machine.ranks
    state = {(entry.name, entry.key): entry.read(ranks) for entry in engine.state_tensors()}
    if not ranks.first:
        return {}
    spec = engine.job.spec
    stored = quantised_weights(spec.build())
    if not stored:
        return state
    quantize = QuantizeSection.model_validate(spec.config["adapter"]["quantize"])
    plan = spec.language.tensor_plan
    for name, weight in stored.items():
        key = name, WEIGHT
        if key in state:
            style = plan.get(name.removesuffix(".weight"), "")
            dim = int(style.startswith("rowwise"))
            parts = engine.job.layout.tensor if style.startswith(("colwise", "rowwise")) else 1
            state[key] = quantising.read(state[key], weight.form.shape, quantize, dim, parts)
    return state
