"""`Engine`: what executes a layout. A protocol, not a base class; and the few types that it speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.optimizers import Update
from trainer.ranks import Ranks
from trainer.state import Piece
from trainer.tasks.task import Batch, Task

Observer = Callable[[str, torch.Tensor], None]
"""Told each parameter's Hugging Face name and its whole, unclipped gradient of the step."""


@dataclass(frozen=True)
class Machine:
    """What this process runs on."""

    device: torch.device
    ranks: Ranks
    local_world_size: int | None = None
    """Processes on this machine, where more than one takes part."""


@dataclass(frozen=True)
class Job:
    """Everything that an engine is built from."""

    layout: Layout
    spec: ModelSpec
    task: Task
    deepspeed: Mapping[str, Any]
    """The resolved DeepSpeed JSON."""
    seed: int
    machine: Machine

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
    """True when a float16 overflow made the engine leave the weights alone."""
    shared: bool = False
    """Whether other ranks hold the rest of `loss_sum`."""

    def loss(self) -> torch.Tensor:
        """Mean loss of the global batch, nats per target (contract 1). Collective; unread, a step sends nothing."""
        if self.shared:
            dist.all_reduce(self.loss_sum)
            self.shared = False
        return self.loss_sum / self.targets


class Engine(Protocol):
    job: Job
    """What it was built from; its seed is that of dropout."""
    notes: tuple[str, ...]
    """What a person should know of how the layout is run, a line each."""

    def step(
        self, step: int, micro_batches: Sequence[Batch], update: Update, observe: Observer | None = None
    ) -> Metrics:
        """One optimizer step over this rank's micro-batches. Collective.

        `observe` is for verification: it is called between the last backward pass and the update.
        """
        ...

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss and number of targets over all ranks. Collective; every rank has as many micro-batches."""
        ...

    def pieces(self) -> list[Piece]:
        """Weights and optimizer state, to read or to write. The same list on every rank."""
        ...

    def scalars(self) -> dict[str, float]:
        """What a resumed run needs back beside the pieces: step counts, the loss scale."""
        ...

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Take back what `scalars` gave. Comes before the pieces are written."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineKind:
    """One engine as data: why it can't run a layout, and how it is built when it can."""

    refusal: Callable[[Layout], str | None]
    """A sentence for a person, or None."""
    build: Callable[[Job], Engine]
    check: Callable[[ModelSpec, Layout], None] = lambda spec, layout: None
    """Raises ConfigError for a model that it can't run in a layout; allocates next to nothing."""


def set_update(groups: Iterable[dict[str, Any]], update: Update) -> None:
    """Tell an optimizer's parameter groups what the schedule says."""
    for group in groups:
        group["lr"] = update.learning_rate
        if update.betas is not None:
            group["betas"] = update.betas


def over_all(loss_sum: torch.Tensor, targets: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss and number of targets over all data ranks. Collective.

    The last pipeline stage alone has a loss; the ranks of a tensor group have the same one.
    """
    totals = torch.stack([loss_sum.double() / layout.tensor, targets * layout.data_ranks / layout.world_size])
    if layout.world_size > 1:
        dist.all_reduce(totals)
    return totals[0], totals[1]
