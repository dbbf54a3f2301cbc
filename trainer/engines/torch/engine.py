"""The step shared by the engines made of PyTorch's own parts; they differ in who wraps the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from trainer.distributed.seeding import step_seed
from trainer.engines.engine import Job, Metrics, Observer, set_update
from trainer.engines.normalise import counted_here, evaluated, gradient_scale
from trainer.engines.torch.state import TorchState
from trainer.optim.lr_schedules import Update
from trainer.optim.optimizer import step_if_finite
from trainer.parallel.batch_norm import RunningStatistics
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.gradients import GradientNorm, GradientSync
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.sparse import Used
from trainer.state import StateTensor
from trainer.tasks.task import Batch


class TorchEngine:
    """Runs a wrapped model, or the pipeline stages of this rank, by contract 1
    (`engines/normalise.py`).
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        optimizer: torch.optim.Optimizer,
        job: Job,
        mesh: ParallelMesh,
        notes: tuple[str, ...] = (),
        used: Used | None = None,
    ) -> None:
        self.notes = notes
        self.job = job
        self._forward_backward = forward_backward
        self._optimizer = optimizer
        self._mesh = mesh
        self._used = used
        self._clip = float(job.deepspeed["gradient_clipping"])
        self._state = TorchState(forward_backward.modules, optimizer, job.machine.ranks, mesh)
        self._sync = GradientSync(
            forward_backward.modules, job.spec, mesh, averages=used is not None
        )
        self._statistics = RunningStatistics(forward_backward.modules, mesh, job.data_rank)
        self._norm = GradientNorm(
            self._sync.parameters, self._sync.counted, mesh, job.machine.device
        )

    def step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        update: Update,
        observe: Observer | None = None,
    ) -> Metrics:
        job, mesh = self.job, self._mesh
        set_update(self._optimizer.param_groups, update)
        targets = mesh.sum(counted_here(job.task, micro_batches, mesh), "loss")
        seed = step_seed(job.seed, step, job.data_rank)
        with self._statistics.of_step(len(micro_batches)):
            loss_sum = self._forward_backward.train(
                seed, micro_batches, gradient_scale(targets, mesh)
            )
        if self._used is not None:
            self._used.agree()
        self._sync.reduce()
        if observe is not None:
            self._state.gradients(observe)
        norm = self._norm.clip(self._clip)
        step_if_finite(self._optimizer, norm)
        self._optimizer.zero_grad()
        return Metrics(loss_sum, targets, norm, group=mesh.group("loss"))

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        return evaluated(self.job.task, self._mesh, self._forward_backward.evaluate, micro_batches)

    def state_tensors(self) -> list[StateTensor]:
        return self._state.state_tensors()

    def scalars(self) -> dict[str, float]:
        return self._state.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._state.restore(scalars)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self._forward_backward.modules

    def close(self) -> None:
        self._optimizer.zero_grad()
