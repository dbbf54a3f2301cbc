"""Forward, backward and update of one optimizer step through DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from trainer.engines.deepspeed import patches, tensor
from trainer.engines.deepspeed.tensor import Split
from trainer.engines.engine import Job
from trainer.models.spec import ModelSpec
from trainer.optim.decay import groups_of
from trainer.parallel.forward_backward import Dropout, ForwardBackward, Scale
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.storage import Json
from trainer.tasks.task import Batch

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def initialize(
    module: nn.Module,
    named: Iterable[tuple[str, nn.Parameter]],
    job: Job,
    config: Json,
    mpu: object = None,
) -> DeepSpeedEngine:
    """Have DeepSpeed wrap a module that has its values, and build the optimizer of `named`."""
    import deepspeed

    decay = config["optimizer"]["params"]["weight_decay"]
    groups = groups_of(named, job.undecayed, decay, job.spec.training.tuned)
    for index, group in enumerate(groups):
        group["name"] = str(index)  # which it needs to part experts from others
    spread = any(hasattr(p, "group_name") for group in groups for p in group["params"])
    with patches.has_expert_layer(module) if spread else nullcontext():
        wrapped = {"model": module, "model_parameters": groups, "config": config, "mpu": mpu}
        engine, *_ = deepspeed.initialize(**wrapped)
    return engine


class StepRunner(ForwardBackward, Protocol):
    """Runs one optimizer step, with its update, in `train`."""

    engine: DeepSpeedEngine
    """The `deepspeed.DeepSpeedEngine`."""
    mesh: ParallelMesh
    split: Split
    """The parameters of which each rank of an axis has a part."""
    notes: tuple[str, ...]
    before_update: list[Callable[[], None]]
    """Called in each step when the gradients are complete and averaged."""

    @property
    def blank(self) -> tuple[nn.Module, ModelSpec]:
        """This rank's model or stage, unsharded, on the meta device, and its spec."""


class AccumulatedStep:
    """A step that runs each micro-batch forward and backward through all blocks before the next."""

    def __init__(
        self, engine: DeepSpeedEngine, job: Job, dropout: Dropout, mesh: ParallelMesh, split: Split
    ) -> None:
        self.engine = engine
        self.modules: list[nn.Module] = [engine.module]
        self.mesh = mesh
        self.split = split
        self.notes: tuple[str, ...] = (tensor.NOTE,) if mesh.layout.tensor > 1 else ()
        self.before_update: list[Callable[[], None]] = []
        self._job = job
        self._dropout = dropout

    @property
    def blank(self) -> tuple[nn.Module, ModelSpec]:
        return self._job.spec.build(), self._job.spec

    def train(self, seed: int, micro_batches: Sequence[Batch], scale: Scale) -> torch.Tensor:
        if not self.engine.module.training:
            self.engine.train()
        losses = []
        for index, batch in enumerate(micro_batches):
            self._dropout.start(seed, index)
            loss = self.engine(batch)
            losses.append(loss.detach())
            self.engine.backward(loss * scale())
            if index + 1 == len(micro_batches):
                for work in self.before_update:
                    work()
            self.engine.step()
        return sum(losses[1:], losses[0])

    def outputs(self, seed: int | None, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        self.engine.train(seed is not None)
        outputs = []
        with torch.no_grad():
            for index, batch in enumerate(micro_batches):
                if seed is not None:
                    self._dropout.start(seed, index)
                outputs.append(self.engine(batch, output=True))
        self._forget_prefetched()
        return outputs

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        self.engine.eval()
        with torch.no_grad():
            measured = torch.stack([self.engine(batch) for batch in micro_batches]).double().sum(0)
        self._forget_prefetched()
        return measured

    def _forget_prefetched(self) -> None:
        """Drop weights that ZeRO-3 prefetched for a backward pass: else they can't be read."""
        if self._job.layout.zero_stage == 3:
            self.engine.optimizer.empty_partition_cache()
