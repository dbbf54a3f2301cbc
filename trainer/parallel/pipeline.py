"""Pipeline stages and their schedule, by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainer.models.cut import StageInput
from trainer.parallel.forward_backward import Dropout, Scale
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.tasks.task import Batch, ModelWithLoss, Task


class Stage(ModelWithLoss):
    """One stage of a model that was cut, with the loss if it is the last.

    It takes the hidden state of the stage before (`Task.hidden_shape`; the first takes none), and
    returns its own; the last returns the summed loss, shape [1], or [1 + measures] in evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        stage_input: StageInput,
        dropout: Dropout,
        blocks: range,
        *,
        last: bool,
    ) -> None:
        super().__init__(model, task)
        self.blocks = blocks
        """The numbers of its blocks in the whole model."""
        self.dropout = dropout
        self._stage_input = stage_input
        self.last = last

    def forward(  # type: ignore[override]
        self, *hidden: torch.Tensor, batch: Batch, seed: int, micro_batch: int
    ) -> torch.Tensor:
        self._stage_input.put(hidden[0] if hidden else None)
        self.dropout.start(seed, micro_batch)
        output = super().forward(batch) if self.last else self._task.hidden(self.model, batch)
        self._stage_input.put(None)
        if torch.is_grad_enabled() and not output.requires_grad:
            # everything up to here is frozen; a schedule sends gradients back to every stage
            output.requires_grad_()
        if self.last:
            return torch.stack([output]) if self.training else output
        # schedules and FSDP change it in place, and only contiguous tensors can be sent
        whole = output.is_contiguous() and not output._is_view()
        return output if whole else output.clone(memory_format=torch.contiguous_format)


class PipelineRun:
    """The stages of this rank, and the schedule by which micro-batches pass through them."""

    def __init__(
        self, stages: Sequence[Stage], task: Task, mesh: ParallelMesh, device: torch.device
    ) -> None:
        self._layout = mesh.layout
        self._stages = dict(zip(mesh.stages, stages, strict=True))
        modules = (module for stage in stages for module in stage.modules())
        self._units = [unit for unit in modules if isinstance(unit, FSDPModule)]
        self._task = task
        self._group = mesh.axis("pipeline")
        self._device = device
        self._schedules: dict[tuple[int, ...], object] = {}
        self._scale: Scale

    @property
    def modules(self) -> list[nn.Module]:
        return list(self._stages.values())

    def train(self, seed: int, micro_batches: Sequence[Batch], scale: Scale) -> torch.Tensor:
        self._scale = scale
        for stage in self._stages.values():
            stage.train()
        for unit in self._units:
            # an evaluation leaves units gathered, and a schedule's first step frees them: data
            # ranks that meet a new shape would gather them again alone, and hang
            unit.reshard()
        batches = self._task.padded(micro_batches)
        losses: list[torch.Tensor] = []
        given = [{"batch": b, "seed": seed, "micro_batch": i} for i, b in enumerate(batches)]
        more = {"target": torch.empty(len(batches)), "losses": losses, "return_outputs": False}
        self._schedule(batches).step(micro_batches=given, **more)
        if losses:
            return torch.stack(losses).sum().detach() / scale()
        return torch.zeros((), device=self._device)

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Run micro-batches one by one; a stage starts the next while later stages still work."""
        count = 1 + len(self._task.measures)
        total = torch.zeros(count, dtype=torch.float64, device=self._device)
        for stage in self._stages.values():
            stage.eval()
        with torch.no_grad():
            for batch in micro_batches:
                for index in range(self._layout.stages):
                    if index in self._stages:
                        hidden = [self._received(index, batch)] if index else []
                        output = self._stages[index](*hidden, batch=batch, seed=0, micro_batch=0)
                        if index + 1 == self._layout.stages:
                            total += output
                        elif index + 1 in self._stages:
                            self._kept = output
                        else:
                            next_rank = self._rank_of(index + 1)
                            dist.send(output.contiguous(), group=self._group, group_dst=next_rank)
        return total

    def _received(self, index: int, batch: Batch) -> torch.Tensor:
        if index - 1 in self._stages:
            return self._kept
        hidden = self._hidden(batch, self._stages[index].blocks.start)
        dist.recv(hidden, group=self._group, group_src=self._rank_of(index - 1))
        return hidden

    def _rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        ranks = range(self._layout.pipeline)
        return next(rank for rank in ranks if stage in self._layout.stages_of(rank))

    def _hidden(self, batch: Batch, block: int) -> torch.Tensor:
        """Make an empty hidden state, as it enters a block."""
        shape = self._task.hidden_shape(batch, block)
        return torch.empty(shape, dtype=getattr(torch, self._layout.precision), device=self._device)

    def _schedule(self, batches: Sequence[Batch]) -> Any:
        """Return the schedule for micro-batches of this shape, made when it first occurs."""
        shape = self._task.shape(batches[0])
        if shape not in self._schedules:
            # requires_grad tells the schedule that gradients of this shape come back
            hidden = {
                block: self._hidden(batches[0], block).to("meta").requires_grad_()
                for stage in self._stages.values()
                for block in (stage.blocks.start, *(() if stage.last else (stage.blocks.stop,)))
                if block > 0
            }
            loss = torch.empty(1, device="meta", requires_grad=True)
            last = self._layout.stages - 1
            stages = [
                PipelineStage(
                    module,
                    index,
                    self._layout.stages,
                    self._device,
                    input_args=(hidden[module.blocks.start],) if index else (),
                    output_args=(hidden[module.blocks.stop],) if index < last else (loss,),
                    group=self._group,
                )
                for index, module in self._stages.items()
            ]
            kind = _schedule_class(self._layout.schedule.name)
            self._schedules[shape] = kind(
                stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
                n_microbatches=self._layout.accumulation,
                loss_fn=lambda output, target: output.squeeze(0) * self._scale(),
                scale_grads=False,
            )
        return self._schedules[shape]


def _schedule_class(name: str) -> Any:
    """Return PyTorch's schedule, whose `step` takes `micro_batches` as they are, unsplit.

    Its own keywords for that, `arg_mbs` and `kwarg_mbs`, came with PyTorch 2.14.
    """
    kind: Any = get_schedule_class(name)

    class Schedule(kind):  # type: ignore[misc]
        def _split_inputs(
            self, args: object, kwargs: Mapping[str, list[object]]
        ) -> tuple[list[object], list[object]]:
            return [()] * len(kwargs["micro_batches"]), kwargs["micro_batches"]

    return Schedule
