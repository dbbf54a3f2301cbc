"""`Engine`: the protocol by which a layout is executed, and the types that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.optim.builders import Builder, No
from trainer.optim.lr_schedules import Update
from trainer.parallel.parallel_mesh import ParallelMesh, parallel_mesh_of
from trainer.state import StateTensor
from trainer.storage import Json
from trainer.supervise.process import Machine
from trainer.tasks.task import Batch, Task

Observer = Callable[[str, torch.Tensor], None]
"""Called with each parameter's Hugging Face name and its whole, unclipped gradient of the step."""


@dataclass(frozen=True)
class Job:
    """The input from which an engine is built."""

    layout: Layout
    spec: ModelSpec
    task: Task
    deepspeed: Json
    """The resolved DeepSpeed JSON."""
    seed: int
    """The seed of dropout."""
    machine: Machine
    undecayed: Mapping[str, int] = field(default_factory=dict)
    """Parameters without weight decay, by Hugging Face name, with their sizes."""
    values_seed: int | None = None
    """The seed of the initial values, if it differs from `seed`."""

    @property
    def seed_of_values(self) -> int:
        return self.seed if self.values_seed is None else self.values_seed

    @property
    def reduction(self) -> torch.dtype:
        """The dtype in which DDP and FSDP reduce gradients; DeepSpeed reads the key itself."""
        low = self.deepspeed.get("communication_data_type") == "bf16"
        return torch.bfloat16 if low else torch.float32

    @property
    def sparse(self) -> bool:
        """True if a rank may lack a gradient that another has."""
        return bool(self.spec.training.sparse) and self.layout.averaging_ranks > 1

    @property
    def one_width(self) -> bool:
        """True if a step's micro-batches of tokens are padded to one width, in every layout.

        Random numbers are drawn for padding, too, so they depend on the width; and a pipeline
        gives all micro-batches of a step one.
        """
        tokens = bool(self.spec.language.vocabulary)
        return tokens and (self.spec.training.draws or self.task.draws)

    @property
    def data_rank(self) -> int:
        """The index of this process's share of the samples."""
        return self.layout.data_rank(self.machine.ranks.rank)


@dataclass
class Metrics:
    """The result of one optimizer step, as tensors on the device; reading them synchronises."""

    loss_sum: torch.Tensor
    """The summed loss of this rank's share of the global batch; of all of it after `loss()`."""
    targets: torch.Tensor
    """The number of targets (label tokens) in the global batch."""
    gradient_norm: torch.Tensor
    """The norm over every axis of the mesh, before clipping."""
    skipped: bool = False
    """True if a gradient was not finite and DeepSpeed left the weights unchanged."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the rest of `loss_sum`."""

    def loss(self) -> torch.Tensor:
        """Return the mean loss of the global batch, nats per target. Collective."""
        if self.group is not None:
            dist.all_reduce(self.loss_sum, group=self.group)
            self.group = None
        return self.loss_sum / self.targets

    def means(self, sums: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the means of figures over the global batch. Collective.

        `sums`: those of this rank's share, and last the number of what they count.
        """
        sums = sums.to(device)
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums[:-1] / sums[-1].clamp_min(1)


class Engine(Protocol):
    job: Job
    """The input from which it was built."""
    notes: tuple[str, ...]
    """Notes for the user on how the layout is run, a line each."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The whole model, or this rank's pipeline stages; parameters are named `model.<name>`."""

    def step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        update: Update,
        observe: Observer | None = None,
    ) -> Metrics:
        """Take one optimizer step over this rank's micro-batches. Collective.

        `observe` is for verification: it is called between the last backward pass and the update.
        """

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss and measures, [1 + measures], and targets, over all ranks.

        Collective; every rank has the same number of micro-batches.
        """

    def state_tensors(self) -> list[StateTensor]:
        """List weights and optimizer state, to read or to write; the same list on every rank."""

    def scalars(self) -> dict[str, float]:
        """Return the step counts and the loss scale, which a resumed run needs, too."""

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Restore the result of `scalars`, before the state tensors are written."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineKind:
    """An engine as data: why it can't run a layout, and how it is built if it can."""

    refusal: Callable[[Layout], str | None]
    """Returns the reason why it can't run a layout, as a sentence, or None."""
    optimizer: Callable[[Json, Layout, str, bool], Builder | No]
    """Returns the builder for the config's optimizer, or a sentence why the engine can't build it.

    Arguments: the resolved DeepSpeed JSON, the layout, the device, True if there are several
    parameter groups.
    """
    build: Callable[[Job], Engine]
    check: Callable[[ModelSpec, Layout], None]
    """Raises ConfigError for a model that it can't run in a layout; allocates next to nothing."""
    ready: Callable[[Layout, torch.device, Json], None]
    """Raises ConfigError if this machine lacks something that the engine needs."""
    forget: Callable[[], None] = lambda: None
    """Undoes what the engine, also one that failed, has changed for the whole process."""


def mesh_of(job: Job) -> ParallelMesh:
    """Make a job's process groups, and tell its task of them. Collective."""
    mesh = parallel_mesh_of(job.layout, job.machine.device, job.spec.language.attention.heads)
    job.task.placed(mesh.context, mesh.group("batch"))
    return mesh


def builder_of(kind: EngineKind, job: Job) -> Builder:
    """Return the builder of a job's optimizer. Raises ConfigError if the engine has none."""
    decays = job.deepspeed["optimizer"]["params"].get("weight_decay", 0) > 0
    grouped = bool(job.spec.training.tuned) or (decays and bool(job.undecayed))
    builder = kind.optimizer(job.deepspeed, job.layout, job.machine.device.type, grouped)
    if isinstance(builder, No):
        actual = job.deepspeed["optimizer"]["type"]
        raise ConfigError(Problem("optimizer.type", actual, "one that it builds", builder))
    return builder
