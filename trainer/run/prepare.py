"""The checks and preparations of a run before the first byte of the model is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import unwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from trainer.checkpoint import ModelForm
from trainer.checkpoint.file_records import new_hash
from trainer.config import Config, RuntimeFacts, TrainerSection, recomputing, support
from trainer.config.keys.key import AUTO
from trainer.config.validate import profile_problems
from trainer.data.order import KEYED, SampleOrder
from trainer.data.progress import Progress
from trainer.distributed.ranks import Ranks
from trainer.engines import Engine, EngineKind, Job, Machine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.own.source import source_of
from trainer.models.pretrained.weights import fingerprint
from trainer.models.spec import ModelSpec, NoWeights
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import LRSchedule, schedule_of
from trainer.parallel.checks import checked, recompute_refusal
from trainer.plugins import NAMED
from trainer.recipe import HandedIn, Subject, open_subject
from trainer.run.compose import Composed, compose
from trainer.run.engine_choice import EngineChoice, choice_of, faster, kept
from trainer.run.evaluate import check_measures
from trainer.run.loop import LoopPlan
from trainer.storage import Json
from trainer.supervise.process import share_of_cores
from trainer.trackers import require

SLOW_DISK = 50e6
"""The lowest speed of a disk, in bytes/s, that is assumed for a save."""


class Begun(NamedTuple):
    """A run's order of samples and its engine, which it keeps from its first step to its last."""

    order: int = KEYED
    """The version of that order."""
    engine: str | None = None
    """The name of the engine; None: no step is made yet."""


BEGINS = Begun()


class RecomputeChoice(NamedTuple):
    """The mode for `trainer.activation_checkpointing` "auto"."""

    mode: str
    reason: str
    plan: Json | None = None
    """The output of `meshloom plan --json` with that mode; None if it was not planned."""


ChooseRecompute = Callable[[Subject, Composed, str, Machine], RecomputeChoice]
"""Chooses a mode, the same on every rank, for the engine of that name or "auto". Collective."""


def recompute_nothing(*_: object) -> RecomputeChoice:
    """Choose "none", for what makes no backward pass."""
    return RecomputeChoice("none", "none: nothing is trained")


@dataclass(frozen=True)
class Purpose:
    """The purpose for which a run is prepared, and what it brings."""

    builds: bool = True
    """False if nothing will be built: this machine need not have what the engine requires."""
    begun: Begun = BEGINS
    choose_recompute: ChooseRecompute = recompute_nothing


@dataclass(frozen=True)
class Prepared:
    """Everything known about a run before the first byte of the model is allocated."""

    config: Config
    layout: Layout
    engine: EngineChoice
    subject: Subject
    steps: int
    model_notes: tuple[str, ...]
    """The findings on a tiny copy of the model, a line each."""
    learned: int
    """The parameters that the optimizer trains, without those that get no gradient from text."""
    undecayed: dict[str, int]
    """Those of them without weight decay, with their sizes."""
    workers: int
    """Processes of each rank that load samples; 0: a thread."""
    order: int = KEYED
    """The version of the samples' order."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests, by name, of the source of the user's own model, loss and optimizer."""
    predicted: Json | None = None
    """The plan by which the recomputed blocks were chosen; None if the config says which."""

    @property
    def saved_bytes(self) -> int:
        """The bytes of weights, and of float32 masters and two moments of what is trained."""
        spec = self.subject.spec
        weights = self.learned if spec.training.unsaved else spec.parameters
        return 4 * weights + 12 * self.learned

    @property
    def save_seconds(self) -> float:
        """The seconds that a save may take without a sign of life, and be no hang."""
        return self.saved_bytes / SLOW_DISK

    @property
    def plan(self) -> LoopPlan:
        section = self.config.trainer
        every = section.log.every, section.checkpoint.every, section.evaluation.every
        fixed = self.steps, self.layout.train_batch, *every
        if section.steps is not None:
            return LoopPlan(*fixed)
        return LoopPlan(*fixed, len(self.subject.data.train), section.epochs or 1)

    @property
    def schedule(self) -> LRSchedule:
        return schedule_of(self.config.settings)

    def job(self, machine: Machine) -> Job:
        """Return what an engine builds on this machine."""
        config = self.config
        subject = self.subject
        return Job(
            self.layout,
            subject.spec,
            subject.task,
            config.deepspeed,
            config.trainer.seed,
            machine,
            self.undecayed,
        )

    def before_training(self, engine: Engine, folder: Path, step: int) -> Prepared:
        """Return the same with what the engine computes of the samples before training, or had
        computed, if the run is resumed after so many steps. Collective."""
        return replace(self, subject=self.subject.before_training(engine, folder, step))

    @property
    def form(self) -> ModelForm:
        """The form in which checkpoints are written."""
        section = self.config.trainer.checkpoint
        stem = self.subject.spec.files.stem
        dtype = getattr(torch, section.dtype) if section.dtype else None
        return ModelForm(dtype, stem, hash=section.hash)

    @property
    def sample_order(self) -> SampleOrder:
        return SampleOrder(self.config.trainer.seed, self.order)

    @property
    def exported_form(self) -> ModelForm:
        """The form in which the final model is written."""
        return replace(self.form, one_file=self.subject.spec.one_file)


def prepare(
    config: Config,
    machine: Machine,
    given: HandedIn | None = None,
    terminal: Console | None = None,
    purpose: Purpose | None = None,
) -> Prepared:
    """Check everything that can be wrong, the cheapest checks first, and return what is known.
    Collective.
    """
    purpose = purpose or Purpose()
    begun = purpose.begun
    ranks = machine.ranks
    section = config.trainer
    composed = compose(config, _facts(machine))
    wanted = kept(composed, begun.engine)
    first = choice_of(composed, wanted)
    if purpose.builds:
        ranks.on_own(lambda: _check_machine(first.kind, composed, machine))
    ranks.on_first(lambda: require(section.log.trackers))
    machine.signs.at("reading what the model and its data are")
    progress = Progress(terminal, machine.watch.moves, machine.signs)
    subject = open_subject(config, given, composed.layout, ranks, progress, begun.order)
    composed, predicted = _chosen(composed, subject, wanted, machine, purpose.choose_recompute)
    machine.signs.at("trying a tiny copy of the model")
    subject, engine, model_notes = _tried(subject, composed, wanted, ranks)
    if purpose.builds:
        if engine != first:
            ranks.on_own(lambda: _check_machine(engine.kind, composed, machine))
        model_notes = (*model_notes, *_kernel_notes(subject, section, composed.layout, machine))
    spec = subject.spec
    steps = _steps_of(section, len(subject.data.train), composed.layout.train_batch)
    composed = composed.knowing(hidden_size=spec.language.hidden_size, total_steps=steps)
    config = _noted(subject.settled(composed.config), composed, engine.name, machine)
    model = spec.build()
    _check_weights(spec, model, machine)
    return Prepared(
        config=config,
        layout=composed.layout,
        engine=engine,
        subject=subject,
        steps=steps,
        model_notes=model_notes,
        learned=sum(p.numel() for p in model.parameters() if p.requires_grad),
        undecayed=spared(section.weight_decay_excludes, spec),
        workers=subject.workers(section, machine),
        order=begun.order,
        sources=_sources(model, config, given),
        predicted=predicted,
    )


def _chosen(
    composed: Composed,
    subject: Subject,
    wanted: str | None,
    machine: Machine,
    choose: ChooseRecompute,
) -> tuple[Composed, Json | None]:
    """Replace "auto" by the mode that decides which blocks are recomputed; return its plan, too.

    From here on nobody sees "auto". The plan is None if the config names a mode. Collective.
    """
    section = composed.config.trainer
    if section.activation_checkpointing != AUTO:
        return composed, None
    machine.signs.at("choosing which activations are recomputed")
    engine = wanted or section.engine
    if machine.device.type == "cpu":  # a plan is one for GPUs, on which "auto" may take another
        engine = choice_of(composed, wanted).name
    choice = choose(subject, composed, engine, machine)
    if choice.mode != "none":
        why = recompute_refusal(subject.spec, subject.probed, machine.ranks, subject.packed)
        if why:
            choice = RecomputeChoice("none", f"none: {why}")
    decided = recomputing(composed.config, choice.mode, choice.reason)
    return compose(decided, composed.facts), choice.plan


def _sources(model: nn.Module, config: Config, given: HandedIn | None) -> Mapping[str, str]:
    """Return the digests of the user's own source, by name."""
    optimizer: Any = NAMED["optimizer"].get(config.optimizer.type)
    own = {"loss": given.loss, "model": given.model} if given else {}
    return source_of(model, optimizer=unwrap(optimizer), **own)


def _check_weights(spec: ModelSpec, model: nn.Module, machine: Machine) -> None:
    """Raise ConfigError unless all machines have the same pretrained weights. Collective."""
    ranks = machine.ranks
    several = (machine.local_world_size or ranks.world_size) < ranks.world_size
    if not several or isinstance(spec.building.weights, NoWeights):
        return
    names = [name for name, _ in model.named_parameters()]
    if others := ranks.differing(ranks.on_own(lambda: fingerprint(spec.building.weights, names))):
        actual = f"other ones on rank {', '.join(map(str, others))} than on rank 0"
        place = f"{spec.name}: pretrained weights"
        expected = "the same files on every machine"
        raise ConfigError(Problem(place, actual, expected)).share()


def _tried(
    subject: Subject, composed: Composed, wanted: str | None, ranks: Ranks
) -> tuple[Subject, EngineChoice, tuple[str, ...]]:
    """Try a tiny copy under the layout. Collective.

    Returns the subject as it is trained, its engine, and notes. Raises ConfigError for
    a model, a layout or an engine that do not go together.
    """
    section = composed.config.trainer
    ranks.try_on_first(lambda: check_measures(subject.task))
    spec, notes = checked(subject.spec, subject.probed, composed.layout, ranks, subject.packed)
    engine = ranks.on_first(lambda: choice_of(composed, wanted, spec))
    ranks.try_on_first(lambda: subject.trained(spec, section))
    return subject.trained(spec, section), engine, notes


def _kernel_notes(
    subject: Subject, section: TrainerSection, layout: Layout, machine: Machine
) -> Iterator[str]:
    """Set the order of attention's kernels where PyTorch chooses among a GPU's; say which run."""
    if machine.device.type == "cuda" and section.model.attention in (None, "sdpa"):
        yield from subject.kernels(layout, machine.device)


def _facts(machine: Machine) -> RuntimeFacts:
    """Return what a config is resolved by, as far as it is known before the model is."""
    kind: Any = machine.device.type
    bf16 = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    world_size = machine.ranks.world_size
    return RuntimeFacts(world_size, None, None, bf16, kind, machine.local_world_size)


def _steps_of(section: TrainerSection, samples: int, train_batch: int) -> int:
    """Return the steps of a run on so many samples. Raises ConfigError for steps to profile that
    it does not have."""
    total = (section.epochs or 1) * samples
    steps = section.steps or max(1, math.ceil(total / train_batch))
    if problems := profile_problems(section, steps):
        raise ConfigError(*problems).share()
    return steps


def _check_machine(engine: EngineKind, composed: Composed, machine: Machine) -> None:
    """Raise ConfigError if this machine lacks what the engine or a checkpoint requires."""
    config = composed.config
    engine.ready(composed.layout, machine.device, config.deepspeed)
    new_hash(config.trainer.checkpoint.hash)


def _noted(config: Config, composed: Composed, name: str, machine: Machine) -> Config:
    """Return the config with the notes on this machine and on the engine of that name."""
    machines = _machine_notes(composed, name, machine)
    return replace(config, notes=(*config.notes, *machines, *support.notes(config, name)))


def _machine_notes(composed: Composed, name: str, machine: Machine) -> Iterator[str]:
    """Yield a note on few cores for an optimizer, and one on an engine that is faster here."""
    if composed.layout.offloads:
        few_cores = share_of_cores(machine.local_world_size or 1)
        if few_cores:
            yield few_cores
    yield from faster(composed, name)
