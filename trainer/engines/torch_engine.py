"""The step that the engines made of PyTorch's own parts share; they differ in who wraps the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.engines.engine import Job, Metrics, Observer, evaluated, set_update
from trainer.engines.torch_state import TorchState, local
from trainer.errors import NumericsError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.optimizers import Update
from trainer.ranks import Ranks
from trainer.seeding import seed_dropout
from trainer.state import Piece
from trainer.tasks.task import Batch, bare_name


class TorchEngine:
    """Runs a wrapped `Trainee` by contract 1.

    DDP and FSDP average gradients over the data ranks; so that the gradient is that of (sum of token losses) /
    (targets of the global batch), each micro-batch's sum is multiplied by data ranks / targets.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, job: Job, notes: tuple[str, ...] = ()
    ) -> None:
        self.notes = notes
        self._module = module
        self._optimizer = optimizer
        self.job = job
        self._clip = float(job.deepspeed.get("gradient_clipping", 0.0))
        # DDP's own name stands before the trainee's
        named = [(bare_name(name.removeprefix("module.")), p) for name, p in module.named_parameters()]
        buffers = [(bare_name(name.removeprefix("module.")), b) for name, b in _persistent_buffers(module)]
        self._parameters = [p for _, p in named if p.requires_grad]
        self._state = TorchState(named, buffers, optimizer, job.machine.ranks)

    def step(
        self, step: int, micro_batches: Sequence[Batch], update: Update, observe: Observer | None = None
    ) -> Metrics:
        job = self.job
        self._module.train()
        set_update(self._optimizer.param_groups, update)
        targets = job.task.targets(micro_batches[0])
        for batch in micro_batches[1:]:
            targets += job.task.targets(batch)
        if job.layout.data_ranks > 1:
            dist.all_reduce(targets)
        losses = []
        for index, batch in enumerate(micro_batches):
            seed_dropout(job.seed, step, index, job.layout.data_rank(job.machine.ranks.rank))
            with self._without_sync() if index + 1 < len(micro_batches) else nullcontext():
                loss = self._module(batch)
                losses.append(loss.detach())
                (loss * (job.layout.data_ranks / targets)).backward()
        if observe is not None:
            self._state.gradients(observe)
        norm = self._clip_and_norm()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Metrics(sum(losses[1:], losses[0]), targets, norm, shared=job.layout.data_ranks > 1)

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        self._module.eval()
        return evaluated(self._module, micro_batches, self.job)

    def pieces(self) -> list[Piece]:
        return self._state.pieces()

    def scalars(self) -> dict[str, float]:
        return self._state.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._state.restore(scalars)

    def close(self) -> None:
        self._optimizer.zero_grad()

    def _without_sync(self) -> Any:
        """DDP keeps gradients to itself until the last micro-batch; FSDP reduces each, to hold but its shard."""
        no_sync = getattr(self._module, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()

    def _clip_and_norm(self) -> torch.Tensor:
        """The norm over all shards, from local parts and one all-reduce; gradients are scaled in place."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        parts = [local(gradient) for gradient in gradients]
        squares = torch.stack(torch._foreach_norm(parts)).float().square().sum()
        sharded = next((g for g in gradients if isinstance(g, DTensor)), None)
        if sharded is not None:
            mesh = sharded.device_mesh
            dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))  # `shard` is the innermost axis
        norm = squares.sqrt()
        if self._clip > 0:
            torch._foreach_mul_(parts, torch.clamp(self._clip / (norm + 1e-6), max=1.0))
        return norm


def prove_units(module: nn.Module, spec: ModelSpec) -> None:
    """Raises NumericsError unless every block is an FSDP unit of its own: one flat unit would gather all at once."""
    units = {name for name, inner in module.named_modules() if isinstance(inner, FSDPModule)}
    missing = [name for name in spec.blocks if f"model.{name}" not in units]
    if missing:
        seen = f"{len(missing)} of {len(spec.blocks)} blocks are no unit of their own ({missing[0]}, ...)"
        raise NumericsError(Problem("FSDP", seen, "one unit per block"))


def prove_replicas(module: nn.Module, layout: Layout, ranks: Ranks) -> None:
    """Raises NumericsError, on all ranks, unless ranks that should hold the same parameters do. Collective."""
    sums = torch.stack([local(p.detach()).double().sum() for p in module.parameters()])
    found = ranks.gather([float(value) for value in sums])
    for rank, theirs in enumerate(found):
        if theirs != found[rank % layout.shard]:
            seen = f"other initial values on rank {rank} than on rank {rank % layout.shard}"
            raise NumericsError(Problem("replicas", seen, "the same on all replicas"))


def _persistent_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = dict(root.named_buffers())
    transient = {
        f"{name}.{key}".lstrip(".")
        for name, module in root.named_modules()
        for key in module._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in named.items() if name not in transient]
