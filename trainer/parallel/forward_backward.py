"""Forward and backward over the micro-batches of a step, and the dropout in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.distributed.seeding import derive, seed_generators
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.tasks.task import Batch


class Dropout:
    """Seeds each micro-batch, and each block in it by its place in the model.

    So a pipeline stage drops what the whole model drops. Recomputed blocks are not seeded again:
    their checkpoint restores the generator state that they had.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self._base = 0
        for index, name in enumerate(spec.blocks if spec.training.draws else ()):
            model.get_submodule(name).register_forward_pre_hook(self._seed_block(index))

    def start(self, step_seed: int, micro_batch: int) -> None:
        """Seed the forward pass of this micro-batch, which comes next."""
        self._base = derive(step_seed, micro_batch)
        seed_generators(self._base)

    def _seed_block(self, index: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seed_generators((self._base + index + 1) % 2**63)

        return hook


Scale = Callable[[], torch.Tensor]
"""The factor of a step's losses, a scalar. The first call waits for the other ranks."""


class ForwardBackward(Protocol):
    @property
    def modules(self) -> Sequence[nn.Module]:
        """The whole model, or this rank's pipeline stages; parameters are named `model.<name>`."""

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the task's measures, summed over this rank's micro-batches, without gradients."""

    def train(self, seed: int, micro_batches: Sequence[Batch], scale: Scale) -> torch.Tensor:
        """Compute the gradients of `scale` x summed loss; return the summed loss, detached.

        `seed` is that of the step's dropout on this data rank.
        """


@runtime_checkable
class RunsAhead(Protocol):
    """Runs the micro-batches of a step for what a task compares (`WholeStep`)."""

    def outputs(self, seed: int | None, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the output of each micro-batch, without gradients.

        As in a step whose dropout has this seed; None: as in an evaluation.
        """


class GradientAccumulation:
    """Runs each micro-batch forward and backward through the whole model before the next.

    DDP, and HSDP between replicas, reduce gradients in the last micro-batch alone. Units of ZeRO-1
    and 2 stay gathered until then. FSDP adds the gradients of each micro-batch to a rank's shard.
    """

    def __init__(
        self, module: nn.Module, dropout: Dropout, layout: Layout, reduction: torch.dtype
    ) -> None:
        # the module inside DDP
        self.modules: list[nn.Module] = [getattr(module, "module", module)]
        self._module = module
        self._dropout = dropout
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._frees = layout.zero_stage == 3
        # FSDP adds up what it has not yet reduced between replicas as it reduces it
        self._low = reduction != torch.float32

    def train(self, seed: int, micro_batches: Sequence[Batch], scale: Scale) -> torch.Tensor:
        self._module.train()
        losses = []
        for index, batch in enumerate(micro_batches):
            self._dropout.start(seed, index)
            last = index + 1 == len(micro_batches)
            for unit in self._units if last or index == 0 else ():
                unit.set_requires_all_reduce(last or self._low, recurse=False)
                unit.set_reshard_after_backward(last or self._frees, recurse=False)
            with nullcontext() if last else getattr(self._module, "no_sync", nullcontext)():
                loss = self._module(batch)
                losses.append(loss.detach())
                (loss * scale()).backward()
        return sum(losses[1:], losses[0])

    def outputs(self, seed: int | None, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        self._module.train(seed is not None)
        outputs = []
        with torch.no_grad():
            for index, batch in enumerate(micro_batches):
                if seed is not None:
                    self._dropout.start(seed, index)
                outputs.append(self._module(batch, output=True))
        return outputs

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        self._module.eval()
        with torch.no_grad():
            return torch.stack([self._module(batch) for batch in micro_batches]).sum(0)
