"""DeepSpeed's PipelineModule over the stages of a cut model, under ZeRO 0 and 1."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trainer.engines.deepspeed_config import DTYPES
from trainer.engines.deepspeed_passes import Step
from trainer.engines.deepspeed_tensor import Split
from trainer.engines.engine import Job
from trainer.engines.homes import place_of
from trainer.engines.stages import hidden_size, stages_of_rank
from trainer.layout import Layout
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec
from trainer.parallel.mesh import Grid, grid_of
from trainer.parallel.pipeline import Pipeline, Stage
from trainer.parallel.replicate import ends
from trainer.tasks.task import Batch


def refusal(layout: Layout) -> str | None:
    """Why PipelineModule can't run a layout."""
    if layout.zero_stage > 1:
        return "Its PipelineModule asserts under ZeRO-2 and 3; the mesh engine runs the same JSON."
    if layout.schedule.name != "1F1B":
        return f"Its PipelineModule has 1F1B alone; the mesh engine has {layout.schedule.name}."
    return None


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether an earlier stage holds the parameter, too, and counts it in norms: DeepSpeed's own mark."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def build(job: Job, config: dict[str, Any]) -> Staged:
    """Cut the model, and make of this rank's stage what DeepSpeed takes for one of several layers."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    layout, device = job.layout, job.machine.device
    grid = grid_of(layout, device)

    def place(stage: Stage, spec: ModelSpec) -> None:
        materialise(stage.model, spec, seed=job.seed, device=device, dtype=DTYPES[layout.precision])

    [stage], note = stages_of_rank(job, grid, place)
    feed = _Feed(stage, first=place_of(grid) == 0)
    layers = [feed if index == place_of(grid) else nn.Identity() for index in range(layout.stages)]
    with redirect_stdout(io.StringIO()):  # it prints its topology
        module = PipelineModule(
            layers,
            topology=PipeDataParallelTopology(num_pp=layout.pipeline, num_dp=layout.data_ranks),
            partition_method="uniform",
            loss_fn=feed.loss,
        )
    tied = {f"model.{name}" for name in job.spec.tied.values()}
    copies = [p for name, p in stage.named_parameters() if name in tied]
    for parameter in copies:
        parameter.ds_pipe_replicated = place_of(grid) > 0  # type: ignore[attr-defined]
    pair = ends(grid) if tied else None
    without = {key: value for key, value in config.items() if key != "pipeline"}  # the stages are made, and recompute
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=[p for p in stage.parameters() if p.requires_grad], config=without
    )
    # in place of its TiedLayerSpec, which is a layer of its own: whose `grad` is to be added up, and over which group
    apart = getattr(engine.optimizer, "use_grad_accum_attribute", False)  # where DeepSpeed itself would miss them
    module.get_tied_weights_and_groups = lambda: [
        (SimpleNamespace(grad=vars(p)["grad_accum"]) if apart else p, pair) for p in copies
    ]
    return Staged(engine, feed, job, grid, note)


class _Feed(nn.Module):
    """A stage as DeepSpeed calls it, with one tensor; the micro-batches of the step wait here."""

    def __init__(self, stage: Stage, *, first: bool) -> None:
        super().__init__()
        self.stage = stage
        self._first = first

    def start(self, micro_batches: Sequence[Batch], step: Step) -> None:
        self._waiting, self._step = enumerate(micro_batches), step

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        index, batch = next(self._waiting)
        hidden = () if self._first else (inputs,)
        output: torch.Tensor = self.stage(*hidden, batch=batch, seed=self._step.seed, micro_batch=index)
        return output.contiguous()

    def loss(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return output.squeeze(0) * self._step.scale()


class Staged:
    """DeepSpeed's 1F1B schedule."""

    def __init__(self, engine: Any, feed: _Feed, job: Job, grid: Grid, note: str) -> None:
        self.engine = engine
        self.trainee: nn.Module = feed.stage
        self.grid: Grid | None = grid
        self.split: Split | None = None
        self.notes: tuple[str, ...] = (note,)
        self._feed = feed
        self._task = job.task
        self._shape: tuple[int, int] | None = None
        self._without_gradients = Pipeline([feed.stage], job.task, grid, hidden_size(job.spec), job.machine.device)
        self._update = engine._take_model_step
        self._nothing = torch.zeros((), device=job.machine.device)

    def train(self, micro_batches: Sequence[Batch], step: Step) -> torch.Tensor:
        batches = self._task.padded(micro_batches)
        if (shape := self._task.shape(batches[0])) != self._shape:
            self.engine.reset_activation_shape()
            self._shape = shape
        self._feed.start(batches, step)

        def update(options: Any) -> None:
            step.before_update()
            self._update(options)

        self.engine._take_model_step = update
        self.engine.train_batch(repeat((self._nothing, self._nothing)))
        return self.engine.total_loss / step.scale() if self.engine.is_last_stage() else self._nothing.clone()

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        return self._without_gradients.evaluate(micro_batches)
