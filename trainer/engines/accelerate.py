"""The accelerate engine: DDP, FSDP2 and HSDP through Accelerate, over the DeviceMesh of its ParallelismConfig."""

from __future__ import annotations

from typing import Any

import torch

from trainer.engines.engine import EngineKind, Job
from trainer.engines.mesh import notes_of
from trainer.engines.mesh import refusal as mesh_refusal
from trainer.engines.torch_engine import TorchEngine, prove_replicas, prove_units
from trainer.layout import Layout
from trainer.models.materialise import materialise
from trainer.optimizers import optimizer_of
from trainer.parallel import recompute, shard
from trainer.parallel.dropout import Dropout
from trainer.parallel.mesh import grid_of
from trainer.parallel.passes import OneByOne
from trainer.tasks.task import Trainee

WHOLE_NOTE = "Accelerate shards a model that is whole: each process holds it in memory once, while it starts"


def refusal(layout: Layout) -> str | None:
    """Why Accelerate can't run a layout."""
    if layout.pipeline > 1:
        return "Accelerate has no pipeline for training."
    if layout.tensor > 1:
        return (
            "Accelerate leaves tensor parallelism to how transformers loads a model, and for its product with FSDP2 "
            "imports a class that transformers 5 has dropped; the mesh engine has both."
        )
    if layout.zero_stage > 0 and layout.world_size == 1:
        return "Accelerate shards over several processes only."
    return mesh_refusal(layout)


def build(job: Job) -> TorchEngine:
    """Materialise the model whole, and let Accelerate wrap it and its optimizer."""
    layout, device = job.layout, job.machine.device
    model = job.task.prepare(job.spec.build())
    # our own wrapping: Accelerate's loses the random state, and with dropout the gradient
    recompute.apply(model, job.spec, layout.recompute)
    materialise(model, job.spec, seed=job.seed, device=device, dtype=torch.float32)
    dropout = Dropout(model, job.spec)
    trainee = Trainee(model, job.task)
    parameters = [p for p in trainee.parameters() if p.requires_grad]
    accelerator = _accelerator(job)
    module, optimizer = accelerator.prepare(trainee, optimizer_of(parameters, job.deepspeed["optimizer"]))
    notes = notes_of(layout)
    if layout.zero_stage > 0:
        prove_units(module, job.spec)
        notes = (WHOLE_NOTE, *notes)
    prove_replicas([module], layout, job.machine.ranks)
    return TorchEngine(OneByOne(module, dropout), optimizer.optimizer, job, grid_of(layout, device), notes)


KIND = EngineKind(refusal, build)


def _accelerator(job: Job) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    layout, cpu = job.layout, job.machine.device.type == "cpu"
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    if cpu:
        _let_cpu_shard(layout)
    if layout.zero_stage == 0:
        return Accelerator(cpu=cpu)
    blocks = {type(job.spec.build().get_submodule(name)).__name__ for name in job.spec.blocks}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.zero_stage == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(blocks),
        mixed_precision_policy=shard.policy_of(layout),
        cpu_offload=shard.offload_of(layout, job.machine.device.type) if layout.offloads else None,
        cpu_ram_efficient_loading=False,
    )
    axes = ParallelismConfig(dp_replicate_size=layout.replicate, dp_shard_size=layout.shard)
    return Accelerator(cpu=cpu, fsdp_plugin=plugin, parallelism_config=axes)


def _let_cpu_shard(layout: Layout) -> None:
    """Accelerate takes an FSDP plugin only where it sees several devices, and ignores it on CPU without a word."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    if layout.zero_stage > 0:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
