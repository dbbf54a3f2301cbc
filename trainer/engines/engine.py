"""`Engine`: what executes a layout. A protocol, not a base class; and the few types that it speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.ranks import Ranks
from trainer.distributed.watch import NoWatch, Watch
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.optim.lr_schedules import Update
from trainer.optim.support import No, Recipe
from trainer.state import StateTensor
from trainer.tasks.task import Batch, Task
from trainer.trackers import Signs

Observer = Callable[[str, torch.Tensor], None]
"""Told each parameter's Hugging Face name and its whole, unclipped gradient of the step."""


@dataclass(frozen=True)
class Machine:
    """What this process runs on."""

    device: torch.device
    ranks: Ranks
    local_world_size: int | None = None
    """Processes on this machine, where more than one takes part."""
    watch: Watch | NoWatch = field(default_factory=NoWatch)
    """Told what this process does."""
    signs: Signs = field(default_factory=Signs)
    """Tell a person what this process does before the first step."""


@dataclass(frozen=True)
class Job:
    """Everything that an engine is built from."""

    layout: Layout
    spec: ModelSpec
    task: Task
    deepspeed: Mapping[str, Any]
    """The resolved DeepSpeed JSON."""
    seed: int
    """Of dropout."""
    machine: Machine
    undecayed: Mapping[str, int] = field(default_factory=dict)
    """The parameters that the optimizer's weight decay spares, by Hugging Face name, with their sizes."""
    values_seed: int | None = None
    """Of the initial values, where it is another."""

    @property
    def seed_of_values(self) -> int:
        return self.seed if self.values_seed is None else self.values_seed

    @property
    def sparse(self) -> bool:
        """Whether a data rank may be without a gradient that another has."""
        return bool(self.spec.sparse) and self.layout.data_ranks > 1

    @property
    def data_rank(self) -> int:
        """Which share of the samples this process sees."""
        return self.layout.data_rank(self.machine.ranks.rank)


@dataclass
class Metrics:
    """One optimizer step, as tensors on the device; reading them is the caller's synchronisation."""

    loss_sum: torch.Tensor
    """Over this rank's share of the global batch; over all of it once `loss` was called."""
    targets: torch.Tensor
    """Target tokens of the global batch."""
    gradient_norm: torch.Tensor
    """Over every axis of the mesh, before clipping."""
    skipped: bool = False
    """True when a gradient that was not finite made DeepSpeed leave the weights alone."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the rest of `loss_sum`."""

    def loss(self) -> torch.Tensor:
        """Mean loss of the global batch, nats per target (contract 1). Collective; unread, a step sends nothing."""
        if self.group is not None:
            dist.all_reduce(self.loss_sum, group=self.group)
            self.group = None
        return self.loss_sum / self.targets


class Engine(Protocol):
    job: Job
    """What it was built from."""
    notes: tuple[str, ...]
    """What a person should know of how the layout is run, a line each."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What this rank holds: the whole model, or its pipeline stages. Parameters are named `model.<name>`."""
        ...

    def step(
        self, step: int, micro_batches: Sequence[Batch], update: Update, observe: Observer | None = None
    ) -> Metrics:
        """One optimizer step over this rank's micro-batches. Collective.

        `observe` is for verification: it is called between the last backward pass and the update.
        """
        ...

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Over all ranks: the summed loss with what the task measures, [1 + measures], and the number of targets.

        Collective; every rank has as many micro-batches.
        """
        ...

    def state_tensors(self) -> list[StateTensor]:
        """Weights and optimizer state, to read or to write. The same list on every rank."""
        ...

    def scalars(self) -> dict[str, float]:
        """What a resumed run needs back beside the state tensors: step counts, the loss scale."""
        ...

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Take back what `scalars` gave. Comes before the state tensors are written."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineKind:
    """One engine as data: why it can't run a layout, and how it is built when it can."""

    refusal: Callable[[Layout], str | None]
    """A sentence for a person, or None."""
    optimizer: Callable[[Mapping[str, Any], Layout, str, bool], Recipe | No]
    """What it makes of the optimizer of a resolved DeepSpeed JSON, in a layout, on a device, with several groups of
    parameters or one; or a sentence why it can't."""
    build: Callable[[Job], Engine]
    check: Callable[[ModelSpec, Layout], None] = lambda spec, layout: None
    """Raises ConfigError for a model that it can't run in a layout; allocates next to nothing."""
    ready: Callable[[Layout, torch.device, Mapping[str, Any]], None] = lambda layout, device, settings: None
    """Raises ConfigError where this machine lacks what it is built with."""


def recipe_of(kind: EngineKind, job: Job) -> Recipe:
    """How a job's optimizer is built. Raises ConfigError where the engine can't."""
    decays = job.deepspeed["optimizer"]["params"].get("weight_decay", 0) > 0
    grouped = bool(job.spec.tuned) or (decays and bool(job.undecayed))
    recipe = kind.optimizer(job.deepspeed, job.layout, job.machine.device.type, grouped)
    if isinstance(recipe, No):
        raise ConfigError(Problem("optimizer.type", job.deepspeed["optimizer"]["type"], "one that it builds", recipe))
    return recipe


def set_update(groups: Iterable[dict[str, Any]], update: Update) -> None:
    """Tell an optimizer's parameter groups what the schedule says, by its `lr_multiplier` for each."""
    for group in groups:
        group["lr"] = update.learning_rate * group.get("lr_multiplier", 1.0)
        if update.betas is not None:
            group["betas"] = update.betas
