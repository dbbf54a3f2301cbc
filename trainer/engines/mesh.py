"""The mesh engine: PyTorch's own DDP, FSDP2, pipelines and DTensor over a DeviceMesh."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.engines.engine import EngineKind, Job
from trainer.engines.stages import hidden_size, model_of, stages_of_rank
from trainer.engines.torch_engine import TorchEngine, prove_replicas, prove_units
from trainer.layout import Layout
from trainer.models.cut import prove
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec
from trainer.optimizers import optimizer_of
from trainer.parallel import shard, tensor
from trainer.parallel.mesh import Grid, grid_of
from trainer.parallel.passes import OneByOne, Passes
from trainer.parallel.pipeline import Pipeline
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
        stages, cut_note = stages_of_rank(job, grid, lambda stage, spec: _place(stage, spec, job, grid))
        prove_replicas(stages, layout, job.machine.ranks)
        passes, notes = Pipeline(stages, job.task, grid, hidden_size(job.spec), device), (cut_note, *notes)
    else:
        passes = _whole(job, grid)
    parameters = [p for module in passes.modules for p in module.parameters() if p.requires_grad]
    return TorchEngine(passes, optimizer_of(parameters, job.deepspeed["optimizer"]), job, grid, notes)


def _whole(job: Job, grid: Grid) -> OneByOne:
    layout, device = job.layout, job.machine.device
    model, dropout = model_of(job, grid)
    trainee = Trainee(model, job.task)
    _place(trainee, job.spec, job, grid)
    prove_replicas([trainee], layout, job.machine.ranks)
    if layout.zero_stage > 0 or layout.replicate == 1 or layout.tensor > 1:  # `Copies` averages in place of DDP
        return OneByOne(trainee, dropout)
    devices = [device.index] if device.index is not None else None
    return OneByOne(DistributedDataParallel(trainee, device_ids=devices, gradient_as_bucket_view=True), dropout)


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


KIND = EngineKind(refusal, build, check)
