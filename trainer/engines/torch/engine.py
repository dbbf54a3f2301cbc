"""The engine made of PyTorch's own parts; `mesh` and `accelerate` differ in who wraps the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from trainer.engines.engine import Job
from trainer.engines.normalise import NormalisedEngine
from trainer.engines.torch.state import TorchState
from trainer.errors import ConfigError, Problem
from trainer.optim.builders import MUON, Builder
from trainer.optim.muon import Shared, hidden_matrices
from trainer.optim.optimizer import optimizer_of, scaling_in_kernel, step_if_finite
from trainer.parallel import float8
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.gradients import GradientNorm, GradientSync
from trainer.parallel.parallel_mesh import ParallelMesh, holders_of
from trainer.parallel.shard import put_back
from trainer.parallel.sparse import Used
from trainer.tasks.task import Batch


class TorchEngine(NormalisedEngine):
    """Runs a wrapped model, or the pipeline stages of this rank."""

    def __init__(
        self,
        forward_backward: ForwardBackward,
        job: Job,
        mesh: ParallelMesh,
        builder: Builder,
        notes: tuple[str, ...],
        used: Used | None = None,
    ) -> None:
        modules = forward_backward.modules
        tuned = job.spec.training.tuned
        named = [pair for module in modules for pair in module.named_parameters()]
        shared = _shared(job, mesh) if builder.library == MUON else None
        optimizer = optimizer_of(builder, named, job.undecayed, tuned, shared)
        state = TorchState(modules, optimizer, job.machine.ranks, mesh)
        super().__init__(job, mesh, forward_backward, optimizer, state, (*notes, *builder.notes))
        self._used = used
        averages = used is not None
        device = job.machine.device
        self._sync = GradientSync(modules, job.spec, mesh, job.reduction, averages=averages)
        scale = scaling_in_kernel(optimizer)
        self._norm = GradientNorm(self._sync.parameters, self._sync.counted, mesh, device, scale)

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        result = super().evaluate(micro_batches)
        if self.job.layout.regathered:
            put_back(self.modules)
        return result

    def _finish(self) -> tuple[torch.Tensor, bool]:
        if self._used is not None:
            self._used.agree()
        self._sync.reduce()
        if self._observe is not None:
            self._state.gradients(self._observe)
        norm = self._norm.clip(self._clip)
        step_if_finite(self._optimizer, norm)
        float8.scale(self._runner.modules, self.job.layout)
        self._optimizer.zero_grad()
        return norm, False

    def close(self) -> None:
        super().close()
        self._optimizer.zero_grad()


def _shared(job: Job, mesh: ParallelMesh) -> Shared:
    """Return what Muon needs of the model and the mesh, or raise ConfigError. Collective."""
    if not (matrices := hidden_matrices(job.spec)):
        expected = "matrices in repeated blocks, which Muon updates"
        hint = 'Take "AdamW".'
        actual = f"{job.spec.name}, which has none"
        raise ConfigError(Problem("optimizer.type: Muon", actual, expected, hint))
    group, places = holders_of(mesh)
    rank = dist.get_rank(group) if group is not None else 0
    return Shared(matrices, job.machine.device, group, rank, places)
