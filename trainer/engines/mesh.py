"""The mesh engine: PyTorch's own DDP, FSDP2, pipelines and DTensor over a DeviceMesh."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.engines.engine import EngineKind, Job
from trainer.engines.torch_engine import TorchEngine, prove_replicas, prove_units
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.cut import cut, prove
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec
from trainer.optimizers import optimizer_of
from trainer.parallel import partition, recompute, shard, tensor
from trainer.parallel.dropout import Dropout
from trainer.parallel.mesh import Grid, grid_of
from trainer.parallel.passes import OneByOne, Passes
from trainer.parallel.pipeline import Pipeline, Stage
from trainer.tasks.task import Trainee

OFFLOAD_NOTE = "FSDP2 offloads a rank's share of weights, gradients and optimizer state together"
ZERO_1_NOTE = "ZeRO-1 runs as ZeRO-2: FSDP2 shards the gradients with the optimizer, for less memory"


def refusal(layout: Layout) -> str | None:
    """Why this engine can't run a layout."""
    if layout.pipeline > 1 and layout.schedule.splits_backward and layout.zero_stage == 3:
        return (
            f"{layout.schedule.name} with ZeRO-3 gives wrong gradients without a word: FSDP2 frees parameters between "
            "the two halves of the backward pass. Use ZeRO-2, or the schedule 1F1B."
        )
    if layout.precision == "float16":
        return "float16 needs a loss scale, which FSDP2 does not bring; the deepspeed engine has one."
    if layout.precision != "float32" and layout.zero_stage == 0:
        return "DDP in bfloat16 would keep no float32 weights; set a ZeRO stage, or use the deepspeed engine."
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        return "FSDP2 offloads to the CPU only."
    if layout.offloads and layout.pipeline * layout.tensor > 1:
        return "Pipelines and tensor parallelism add gradients up on the device, where offload does not keep them."
    return None


def notes_of(layout: Layout) -> tuple[str, ...]:
    """What FSDP2 does otherwise than the config's words say."""
    one = layout.offloads and "none" in (layout.offload_optimizer, layout.offload_param)
    return ((ZERO_1_NOTE,) if layout.zero_stage == 1 else ()) + ((OFFLOAD_NOTE,) if one else ())


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raises ConfigError for a model that can't be cut or split so."""
    if layout.tensor > 1:
        tensor.check(spec, layout)
    if layout.pipeline > 1:
        prove(spec, layout.stages)


def build(job: Job) -> TorchEngine:
    """Build and wrap what this rank holds: the whole model, or its pipeline stages."""
    layout, device = job.layout, job.machine.device
    grid = grid_of(layout, device)
    notes = notes_of(layout)
    passes: Passes
    if layout.pipeline > 1:
        stages, cut_note = _stages(job, grid)
        passes, notes = Pipeline(stages, job.task, grid, _hidden_size(job.spec), device), (cut_note, *notes)
    else:
        passes = _whole(job, grid)
    parameters = [p for module in passes.modules for p in module.parameters() if p.requires_grad]
    return TorchEngine(passes, optimizer_of(parameters, job.deepspeed["optimizer"]), job, grid, notes)


def _whole(job: Job, grid: Grid) -> OneByOne:
    layout, device = job.layout, job.machine.device
    model, dropout = _model(job, grid)
    trainee = Trainee(model, job.task)
    _place(trainee, job.spec, job, grid)
    prove_replicas([trainee], layout, job.machine.ranks)
    if layout.zero_stage > 0 or layout.replicate == 1 or layout.tensor > 1:  # `Copies` averages in place of DDP
        return OneByOne(trainee, dropout)
    devices = [device.index] if device.index is not None else None
    return OneByOne(DistributedDataParallel(trainee, device_ids=devices, gradient_as_bucket_view=True), dropout)


def _stages(job: Job, grid: Grid) -> tuple[list[Stage], str]:
    """The stages of this rank, and a line on how the model was cut."""
    layout, spec = job.layout, job.spec
    anatomy = job.machine.ranks.on_first(lambda: prove(spec, layout.stages))
    parts = partition.parts(spec.build(), spec, layout.partition, layout.stages)
    stages = []
    for index in partition.stages_of(layout, grid.mesh.get_local_rank("pipeline")):
        model, dropout = _model(job, grid)
        inlet = cut(model, spec, anatomy, parts[index])
        stage = Stage(model, job.task, inlet, dropout, last=index + 1 == layout.stages)
        _place(stage, replace(spec, blocks=tuple(spec.blocks[i] for i in parts[index])), job, grid)
        stages.append(stage)
    prove_replicas(stages, layout, job.machine.ranks)
    blocks = " | ".join(str(len(part)) for part in parts)
    bubble = (layout.pipeline - 1) / (layout.accumulation * layout.schedule.stages_per_rank + layout.pipeline - 1)
    note = f"{layout.stages} pipeline stages of {blocks} blocks; idle for about {bubble:.0%} of a step by {{}}"
    return stages, note.format(layout.schedule.name)


def _model(job: Job, grid: Grid) -> tuple[nn.Module, Dropout]:
    """The whole model on the meta device, with all that is done to a block's forward."""
    model = job.task.prepare(job.spec.build())
    recompute.apply(model, job.spec, job.layout.recompute)
    if job.layout.tensor > 1:
        tensor.apply(model, job.spec, grid)
    return model, Dropout(model, job.spec)


def _place(trainee: Trainee, spec: ModelSpec, job: Job, grid: Grid) -> None:
    """Shard a trainee on the meta device, if ZeRO asks for it, and give this rank's part its values."""
    if job.layout.zero_stage > 0:
        for name in spec.blocks:
            shard.apply(trainee.model.get_submodule(name), grid)
        shard.apply(trainee, grid)
        prove_units(trainee, spec)
    device = job.machine.device
    home = torch.device("cpu") if job.layout.offloads else device
    materialise(trainee.model, spec, seed=job.seed, device=device, dtype=torch.float32, home=home)


def _hidden_size(spec: ModelSpec) -> int:
    if spec.hidden_size is None:
        raise ConfigError(Problem(f"pipeline.stages: {spec.name}", "no hidden size", "a transformer"))
    return spec.hidden_size


KIND = EngineKind(refusal, build, check)
