"""DeepSpeed's PipelineModule over the stages of a cut model, under ZeRO 0 and 1."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import InitVar, dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from trainer.engines.deepspeed import patches, tensor
from trainer.engines.deepspeed.forward_backward import initialize
from trainer.engines.engine import Job, mesh_of
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.materialise import Placement, materialise
from trainer.models.spec import ModelSpec
from trainer.parallel.apply import stages_of_rank
from trainer.parallel.forward_backward import Scale
from trainer.parallel.gradients import ends, on_both
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.pipeline import PipelineRun, Stage
from trainer.storage import Json
from trainer.tasks.task import Batch

if TYPE_CHECKING:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine


def refusal(layout: Layout) -> str | None:
    """Return the reason why PipelineModule can't run a layout, or None."""
    if layout.zero_stage > 1:
        return "Its PipelineModule asserts under ZeRO-2 and 3; the mesh engine runs the same JSON."
    if layout.schedule.name != "1F1B":
        return f"Its PipelineModule has 1F1B alone; the mesh engine has {layout.schedule.name}."
    return None


def is_copy(parameter: nn.Parameter) -> bool:
    """Return DeepSpeed's mark of a parameter that an earlier stage holds and counts, too."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def build(job: Job, config: Json) -> PipelinedStep:
    """Cut the model, and pass this rank's stage to DeepSpeed as one of several layers."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    layout = job.layout
    device = job.machine.device
    mesh = mesh_of(job)
    rank = mesh.rank("pipeline")

    blank: list[tuple[nn.Module, ModelSpec]] = []

    def finish(stage: Stage, spec: ModelSpec) -> None:
        blank.append((copy.deepcopy(stage.model), spec))
        placement = Placement(device, getattr(torch, layout.precision), plain=True)
        materialise(stage.model, spec, seed=job.seed_of_values, placement=placement)
        tensor.mark_experts(stage.model, spec, mesh)

    [stage], note = stages_of_rank(
        job.spec, job.task, mesh, job.machine.ranks, finish, job.machine.signs.applied
    )
    job.machine.ranks.on_own(lambda: _check_learns(stage, rank, job.spec))
    layer = _StageLayer(stage, first=rank == 0)
    layers = [layer if index == rank else nn.Identity() for index in range(layout.stages)]
    with redirect_stdout(io.StringIO()):  # it prints its topology
        topology = PipeDataParallelTopology(num_pp=layout.pipeline, num_dp=layout.averaging_ranks)
        options = {"partition_method": "uniform", "loss_fn": layer.loss}
        module = PipelineModule(layers, topology=topology, **options)
    tied = {f"model.{name}" for name in job.spec.tied.values()}
    pair = ends(mesh) if tied else None

    def equalise() -> None:
        """Copy tied tables to the last stage, which sums data ranks in another order."""
        for parameter in copies:
            dist.broadcast(parameter.data, group=pair, group_src=0)

    trained = {name: p for name, p in stage.named_parameters() if name in tied and p.requires_grad}
    copies = [trained[name] for name in on_both(pair, trained)]
    # stages are cut, and recomputed, here
    without = {key: value for key, value in config.items() if key != "pipeline"}
    engine = initialize(module, stage.named_parameters(), job, without)
    _check_groups(engine.optimizer, mesh, job.spec)
    patches.tie_stages(module, engine.optimizer, copies, pair, is_copy=rank > 0)
    return PipelinedStep(engine, layer, job, mesh, blank[0], (note,), equalise)


def _check_learns(stage: Stage, rank: int, spec: ModelSpec) -> None:
    if not any(parameter.requires_grad for parameter in stage.parameters()):
        place = f"engine deepspeed: {spec.name}"
        actual = f"pipeline stage {rank} is frozen as a whole"
        expected = "a trained parameter in each stage: DeepSpeed makes no optimizer without one"
        raise ConfigError(Problem(place, actual, expected, 'Set trainer.engine to "mesh".'))


def _check_groups(optimizer: ZeROOptimizer, mesh: ParallelMesh, spec: ModelSpec) -> None:
    counts = [0] * mesh.layout.pipeline
    dist.all_gather_object(counts, len(optimizer.param_groups), group=mesh.axis("pipeline"))
    if len(set(counts)) > 1 and hasattr(optimizer, "scaled_global_norm"):
        place = f"engine deepspeed: {spec.name}"
        actual = (
            f"pipeline stages of {', '.join(map(str, counts))} parameter groups (experts, decay)"
        )
        expected = "as many on each: stages add up their norms group by group, and would hang"
        raise ConfigError(Problem(place, actual, expected, 'Set trainer.engine to "mesh".'))


class _StageLayer(nn.Module):
    """A stage as DeepSpeed calls it, with one tensor; it keeps the micro-batches of the step."""

    def __init__(self, stage: Stage, *, first: bool) -> None:
        super().__init__()
        self.stage = stage
        self._first = first

    def start(self, seed: int, micro_batches: Sequence[Batch], scale: Scale) -> None:
        self._seed = seed
        self._waiting = enumerate(micro_batches)
        self._scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        index, batch = next(self._waiting)
        hidden = () if self._first else (inputs,)
        output: torch.Tensor = self.stage(*hidden, batch=batch, seed=self._seed, micro_batch=index)
        return output.contiguous()

    def loss(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return output.squeeze(0) * self._scale()


@dataclass(eq=False)
class PipelinedStep:
    """A step by DeepSpeed's 1F1B schedule; `after_update` is called after it."""

    engine: DeepSpeedEngine
    layer: _StageLayer
    job: Job
    mesh: ParallelMesh
    blank: tuple[nn.Module, ModelSpec]
    notes: tuple[str, ...]
    after_update: InitVar[Callable[[], None]]

    def __post_init__(self, after_update: Callable[[], None]) -> None:
        stage = self.layer.stage
        task = self.job.task
        device = self.job.machine.device
        self.modules: list[nn.Module] = [stage]
        self.split = tensor.split_of_experts(stage.model, self.blank[1], self.mesh)
        self._shape: tuple[int, ...] | None = None
        self.evaluate = PipelineRun([stage], task, self.mesh, device).evaluate
        self.before_update: list[Callable[[], None]] = []
        patches.surround_update(self.engine, self.before_update, after_update)
        self._nothing = torch.zeros((), device=device)

    def train(self, seed: int, micro_batches: Sequence[Batch], scale: Scale) -> torch.Tensor:
        batches = self.job.task.padded(micro_batches)
        if (shape := self.job.task.shape(batches[0])) != self._shape:
            self.engine.reset_activation_shape()
            self._shape = shape
        self.layer.start(seed, batches, scale)
        self.engine.train_batch(repeat((self._nothing, self._nothing)))
        if self.engine.is_last_stage():
            loss: torch.Tensor = self.engine.total_loss / scale()
            return loss
        return self._nothing.clone()
