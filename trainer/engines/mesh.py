"""The mesh engine: PyTorch's own DDP and FSDP2 over a DeviceMesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.engines.engine import EngineKind, Job
from trainer.engines.torch_engine import TorchEngine, prove_replicas, prove_units
from trainer.layout import Layout
from trainer.models.materialise import materialise
from trainer.optimizers import optimizer_of
from trainer.parallel import recompute, shard
from trainer.parallel.dropout import Dropout
from trainer.parallel.mesh import Grid, grid_of
from trainer.parallel.passes import OneByOne
from trainer.tasks.task import Trainee

ZERO_1_NOTE = "ZeRO-1 runs as ZeRO-2: FSDP2 shards the gradients with the optimizer, for less memory"


def refusal(layout: Layout) -> str | None:
    """Why this engine can't run a layout."""
    if layout.pipeline > 1:
        return "Pipelines are not offered yet."
    if layout.tensor > 1:
        return "Tensor parallel training is not offered yet."
    if layout.precision == "float16":
        return "float16 needs a loss scale, which FSDP2 does not bring; the deepspeed engine has one."
    if layout.precision != "float32" and layout.zero_stage == 0:
        return "DDP in bfloat16 would keep no float32 weights; set a ZeRO stage, or use the deepspeed engine."
    if layout.offload_optimizer != "none" or layout.offload_param != "none":
        return "Offload is the deepspeed engine's."
    return None


def build(job: Job) -> TorchEngine:
    """Materialise the model a unit at a time, each block sharded as soon as it has its values."""
    layout, device = job.layout, job.machine.device
    grid = grid_of(layout, device)
    model = job.task.prepare(job.spec.build())
    recompute.apply(model, job.spec, layout.recompute)
    dropout = Dropout(model, job.spec)
    trainee = Trainee(model, job.task)
    place_in(trainee, job, grid)
    prove_replicas([trainee], layout, job.machine.ranks)
    module: nn.Module = trainee
    if layout.zero_stage == 0 and layout.replicate > 1:
        module = DistributedDataParallel(trainee, device_ids=[device.index] if device.index is not None else None)
    parameters = [p for p in trainee.parameters() if p.requires_grad]
    notes = (ZERO_1_NOTE,) if layout.zero_stage == 1 else ()
    optimizer = optimizer_of(parameters, job.deepspeed["optimizer"])
    return TorchEngine(OneByOne(module, dropout), optimizer, job, grid, notes)


def place_in(trainee: Trainee, job: Job, grid: Grid) -> None:
    """Give a trainee on the meta device its values; under ZeRO each block is sharded as soon as it has them."""
    model, spec, device = trainee.model, job.spec, job.machine.device
    if job.layout.zero_stage == 0:
        materialise(model, spec, seed=job.seed, device=device, dtype=torch.float32)
        return
    blocks = {model.get_submodule(name) for name in spec.blocks}

    def place(module: nn.Module, parameters: list[nn.Parameter]) -> None:
        if module in blocks:
            shard.apply(module, grid)

    materialise(model, spec, seed=job.seed, device=device, dtype=torch.float32, place=place)
    shard.apply(trainee, grid)
    prove_units(trainee, spec)


KIND = EngineKind(refusal, build)
