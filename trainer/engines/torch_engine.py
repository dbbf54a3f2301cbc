"""The step that the engines made of PyTorch's own parts share; they differ in who wraps the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.engines.engine import Job, Metrics, Observer, over_all, set_update
from trainer.engines.torch_state import TorchState
from trainer.errors import NumericsError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.optimizers import Update, step_if_finite
from trainer.parallel.mesh import Grid
from trainer.parallel.passes import Passes
from trainer.parallel.replicate import Copies, local
from trainer.ranks import Ranks
from trainer.seeding import step_seed
from trainer.state import Piece
from trainer.tasks.task import Batch


class TorchEngine:
    """Runs wrapped models by contract 1.

    Gradients are averaged over the data ranks; so that the gradient is that of (sum of token losses) / (targets of
    the global batch), each micro-batch's sum is multiplied by data ranks / targets.
    """

    def __init__(
        self, passes: Passes, optimizer: torch.optim.Optimizer, job: Job, grid: Grid, notes: tuple[str, ...] = ()
    ) -> None:
        self.notes = notes
        self.job = job
        self._passes = passes
        self._optimizer = optimizer
        self._grid = grid
        self._clip = float(job.deepspeed.get("gradient_clipping", 0.0))
        self._state = TorchState(passes.modules, optimizer, job.machine.ranks, grid)
        self._copies = Copies(passes.modules, job.spec, grid)
        self._weights = torch.empty(0)
        """Which part of each squared norm this rank counts, where it is not all."""

    def step(
        self, step: int, micro_batches: Sequence[Batch], update: Update, observe: Observer | None = None
    ) -> Metrics:
        job, layout = self.job, self.job.layout
        set_update(self._optimizer.param_groups, update)
        targets = job.task.targets(micro_batches[0])
        for batch in micro_batches[1:]:
            targets += job.task.targets(batch)
        if layout.data_ranks > 1:
            dist.all_reduce(targets)
            targets //= layout.world_size // layout.data_ranks
        loss_sum = self._passes.train(
            step_seed(job.seed, step, job.data_rank), micro_batches, layout.data_ranks / targets
        )
        self._copies.reduce()
        if observe is not None:
            self._state.gradients(observe)
        norm = self._clip_and_norm()
        step_if_finite(self._optimizer, norm)
        self._optimizer.zero_grad()
        return Metrics(loss_sum / layout.tensor, targets, norm, shared=layout.world_size > 1)

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        batches = list(micro_batches)
        targets = torch.stack([self.job.task.targets(batch) for batch in batches]).sum()
        return over_all(self._passes.evaluate(batches), targets, self.job.layout)

    def pieces(self) -> list[Piece]:
        return self._state.pieces()

    def scalars(self) -> dict[str, float]:
        return self._state.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._state.restore(scalars)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What this rank holds: the whole model, or its pipeline stages."""
        return self._passes.modules

    def close(self) -> None:
        self._optimizer.zero_grad()

    def _clip_and_norm(self) -> torch.Tensor:
        """The norm over the whole model, from local parts and one all-reduce; gradients are scaled in place."""
        counted = [(p.grad, share) for p, share in self._copies.shares if p.grad is not None]
        parts = [local(gradient) for gradient, _ in counted]
        squares = torch.stack(torch._foreach_norm(parts)).float().square()
        if self._copies.any:
            if len(self._weights) != len(squares):  # made once: making it is a copy to the device
                self._weights = torch.tensor([share for _, share in counted], device=squares.device)
            squares *= self._weights
        total = squares.sum().to(self.job.machine.device)  # gradients may be offloaded
        if self.job.layout.world_size > self.job.layout.replicate:
            dist.all_reduce(total, group=self._grid.replica)
        norm = total.sqrt()
        if self._clip > 0:
            torch._foreach_mul_(parts, torch.clamp(self._clip / (norm + 1e-6), max=1.0).to(squares.device))
        return norm


def prove_units(module: nn.Module, spec: ModelSpec) -> None:
    """Raises NumericsError unless every block is an FSDP unit of its own: one flat unit would gather all at once."""
    units = {name for name, inner in module.named_modules() if isinstance(inner, FSDPModule)}
    missing = [name for name in spec.blocks if f"model.{name}" not in units]
    if missing:
        seen = f"{len(missing)} of {len(spec.blocks)} blocks are no unit of their own ({missing[0]}, ...)"
        raise NumericsError(Problem("FSDP", seen, "one unit per block"))


def prove_replicas(modules: Sequence[nn.Module], layout: Layout, ranks: Ranks) -> None:
    """Raises NumericsError, on all ranks, unless ranks that should hold the same parameters do. Collective."""
    with torch.no_grad():
        sums = torch.stack([_checksum(local(p)) for module in modules for p in module.parameters()])
    found = ranks.gather([float(value) for value in sums])
    inner, outer = layout.shard * layout.tensor, layout.world_size // layout.pipeline
    for rank, theirs in enumerate(found):
        first = rank // outer * outer + rank % inner
        if theirs != found[first]:
            seen = f"other initial values on rank {rank} than on rank {first}"
            raise NumericsError(Problem("replicas", seen, "the same on all replicas"))


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Their sum in float64, a little at a time: this is where a rank is fullest."""
    return torch.stack([part.sum(dtype=torch.float64) for part in values.reshape(-1).split(1 << 20)]).sum()
