"""The accelerate engine: DDP, FSDP2 and HSDP as Accelerate wraps them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.engines.engine import EngineKind, Job, builder_of, mesh_of
from trainer.engines.torch import mesh as mesh_engine
from trainer.engines.torch.engine import TorchEngine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.optim.builders import in_torch
from trainer.parallel import shard
from trainer.parallel.apply import give_values, sharding_of, wrap_blocks
from trainer.parallel.forward_backward import GradientAccumulation
from trainer.parallel.parallel_mesh import check_replicas
from trainer.parallel.patches import resharding_over, steady_buckets
from trainer.parallel.probes import fsdp_units
from trainer.parallel.sparse import Used
from trainer.tasks.task import ModelWithLoss

if TYPE_CHECKING:
    from accelerate import Accelerator


def refusal(layout: Layout) -> str | None:
    """Return the reason why Accelerate can't run a layout, or None."""
    if layout.pipeline > 1:
        return "Accelerate has no pipeline for training."
    if layout.tensor > 1:
        leaves = "Accelerate leaves tensor parallelism to how transformers loads a model"
        product = "for its product with FSDP2 imports a class that transformers 5 has dropped"
        return f"{leaves}, and {product}; the mesh engine has both."
    if layout.expert > 1:
        return "Accelerate has no expert parallelism for training; the mesh engine has."
    if layout.zero_stage > 0 and layout.shard == 1 < layout.replicate:
        return "Accelerate has no replicas of a single rank each under ZeRO; the mesh engine has."
    return mesh_engine.refusal(layout)


def build(job: Job) -> TorchEngine:
    """Have Accelerate wrap the model: with values for replicas, on the meta device for shards."""
    from accelerate.utils import fsdp2_prepare_model

    job, notes = mesh_engine.compiling(job)
    layout = job.layout
    spec = job.spec
    device = job.machine.device
    mesh = mesh_of(job)
    say = job.machine.signs.applied
    model, dropout = wrap_blocks(spec, job.task, layout, mesh, say=say)
    module: Any = ModelWithLoss(model, job.task)
    accelerator = _accelerator(job)
    ends, noted = job.machine.ranks.on_first(lambda: fsdp_units.ends_of(spec, layout))
    if layout.zero_stage > 0:
        axes = accelerator.parallelism_config
        whole = accelerator.torch_device_mesh
        shared = whole and whole[tuple(axes.fsdp_dim_names)]
        base = shard.kept_whole(model, spec, layout)
        options = shard.options_of(layout, shared, device.type, job.reduction, base)
        # `prepare` calls this, but maps an optimizer by addresses, which meta tensors lack
        with resharding_over(mesh.secondary):
            shard.apply(module, spec, ends, options, partial(fsdp2_prepare_model, accelerator))
        say(sharding_of("Accelerate's FSDP", layout))
    give_values(model, spec, layout, job.seed_of_values, device)
    if layout.zero_stage == 0:
        with nullcontext() if job.sparse else steady_buckets():  # sparse: DDP keeps one
            module = accelerator.prepare(module)
        say(f"Accelerate's DDP over replicate={layout.replicate}")
    check_replicas([module], mesh, job.machine.ranks)
    used = Used([module], mesh) if job.sparse and layout.zero_stage > 0 else None
    forward_backward = GradientAccumulation(module, dropout, layout, job.reduction)
    return TorchEngine(forward_backward, job, mesh, builder_of(KIND, job), (*notes, *noted), used)


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError if another module has the class of a block: Accelerate shards by class."""
    mesh_engine.check(spec, layout)
    if layout.zero_stage == 0:
        return
    model = spec.build()
    classes = _classes_of_blocks(model, spec)
    outside = ((name, m) for name, m in model.named_modules() if name not in spec.blocks)
    named = ((name, type(module).__name__) for name, module in outside)
    if other := [f"{name} ({kind})" for name, kind in named if kind in classes]:
        place = f"engine accelerate: {spec.name}"
        hint = 'Set trainer.engine to "mesh".'
        actual = f"{other[0]} has a block's class but is not a block: it would be a unit of its own"
        expected = "a class for blocks alone, by which Accelerate shards"
        raise ConfigError(Problem(place, actual, expected, hint))


KIND = EngineKind(refusal, in_torch, build, check, mesh_engine.ready)


def _accelerator(job: Job) -> Accelerator:
    from accelerate import Accelerator, state, utils

    layout = job.layout
    cpu = job.machine.device.type == "cpu"
    for kept in (state.AcceleratorState, state.GradientState, state.PartialState):
        kept._reset_state()
    _let_shard(layout, cpu)
    if layout.zero_stage == 0:
        # DDP itself then determines which parameters have a gradient on any rank
        hook = utils.DDPCommunicationHookType("bf16" if job.reduction == torch.bfloat16 else "no")
        kwargs = utils.DistributedDataParallelKwargs(
            comm_hook=hook, find_unused_parameters=job.sparse, broadcast_buffers=False
        )
        return Accelerator(cpu=cpu, kwargs_handlers=[kwargs])
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.zero_stage == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(_classes_of_blocks(job.spec.build(), job.spec)),
        mixed_precision_policy=shard.policy_of(layout, job.reduction),
        cpu_offload=shard.offload_of(layout, job.machine.device.type) if layout.offloads else None,
        cpu_ram_efficient_loading=False,
    )
    # without replicas, FSDP2's default of all processes: Accelerate makes no mesh of one process
    axes = utils.ParallelismConfig(layout.replicate, layout.shard) if layout.replicate > 1 else None
    return Accelerator(cpu=cpu, fsdp_plugin=plugin, parallelism_config=axes)


def _classes_of_blocks(model: nn.Module, spec: ModelSpec) -> set[str]:
    return {type(model.get_submodule(name)).__name__ for name in spec.blocks}


def _let_shard(layout: Layout, cpu: bool) -> None:
    """Let Accelerate shard on any device: without several GPUs it ignores an FSDP plugin."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=cpu)
    if layout.zero_stage > 0:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
