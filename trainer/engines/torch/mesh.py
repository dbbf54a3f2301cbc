"""The mesh engine: PyTorch's own DDP, FSDP2, pipelines and DTensor over a DeviceMesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.engines.engine import EngineKind, Job, builder_of, mesh_of
from trainer.engines.torch.engine import TorchEngine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.optim.builders import in_torch
from trainer.parallel import compilation, float8, shard
from trainer.parallel.apply import give_values, sharding_of, stages_of_rank, wrap_blocks
from trainer.parallel.forward_backward import ForwardBackward, GradientAccumulation
from trainer.parallel.parallel_mesh import check_replicas
from trainer.parallel.patches import resharding_over, steady_buckets
from trainer.parallel.pipeline import PipelineRun
from trainer.parallel.probes import compiled_blocks, expert_parts, fsdp_units, tensor_parts
from trainer.parallel.sparse import Used
from trainer.parallel.splits import expert_ranks, matrices, vocabulary
from trainer.probes.questions.stages import check_cut
from trainer.tasks.task import ModelWithLoss

OFFLOAD_NOTE = "FSDP2 offloads a rank's share of weights, gradients and optimizer state together"
ZERO_1_NOTE = (
    "ZeRO-1 runs as ZeRO-2: FSDP2 shards the gradients with the optimizer, for less memory"
)


V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose messages fail over gloo with PyTorch 2.10; between it and 2.15 is untested."""


def refusal(layout: Layout) -> str | None:
    """Return the reason why this engine can't run a layout, or None."""
    schedule = layout.schedule.name
    if layout.compile == "blocks" and (reason := compilation.refusal(layout)):
        return reason
    if reason := shard.refusal(layout) or float8.refusal(layout):
        return reason
    if layout.pipeline > 1 and schedule in V_SHAPED and torch.__version__ < "2.15":
        needs = f"needs PyTorch 2.15; this is {torch.__version__}"
        others = "Use 1F1B, Interleaved1F1B or InterleavedZeroBubble."
        return f"trainer.pipeline_schedule {schedule} {needs}. {others}"
    splits_backward = layout.pipeline > 1 and layout.schedule.splits_backward
    if splits_backward and layout.recompute.mode == "selective":
        halves = f"{schedule} recomputes a block in each half of the backward pass"
        return f"{halves}; PyTorch keeps selective's products for one. Use full, or 1F1B."
    if splits_backward and layout.zero_stage == 3:
        frees = "FSDP2 frees parameters between the two halves of the backward pass"
        wrong = f"{schedule} with ZeRO-3 silently gives wrong gradients"
        return f"{wrong}: {frees}. Use ZeRO-2, or the schedule 1F1B."
    if layout.updated != "float32" and layout.float8 != "none":
        return "float8 products are proven beside float32 weights; set bf16_optimizer_states false."
    if layout.precision == "float16":
        other = "the deepspeed engine has one."
        return f"float16 needs a loss scale, which FSDP2 does not bring; {other}"
    if layout.precision != "float32" and layout.zero_stage == 0:
        hint = "set a ZeRO stage, or use the deepspeed engine."
        return f"DDP in bfloat16 would keep no float32 weights; {hint}"
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        return "FSDP2 offloads to the CPU only."
    if layout.offloads and layout.pipeline * layout.tensor > 1:
        on_device = "add gradients up on the device, where offload does not keep them."
        return f"Pipelines and tensor parallelism {on_device}"
    return None


def notes_of(layout: Layout) -> tuple[str, ...]:
    """Return notes on where FSDP2 differs from the words of the config."""
    one = layout.offloads and "none" in (layout.offload_optimizer, layout.offload_param)
    return ((ZERO_1_NOTE,) if layout.zero_stage == 1 else ()) + ((OFFLOAD_NOTE,) if one else ())


def compiling(job: Job) -> tuple[Job, tuple[str, ...]]:
    """Return the job with its `compile` decided, and all notes on its layout. Collective."""
    layout, notes = compiled_blocks.decided(job.layout, job.spec, job.machine)
    return replace(job, layout=layout), (*notes_of(layout), *notes)


def ready(layout: Layout, device: torch.device, settings: Mapping[str, object]) -> None:
    """Raise ConfigError if this machine lacks the compiler that is asked for."""
    compilation.check_compiler(layout, device)


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that can't be cut or split as the layout requires."""
    fsdp_units.check_shardable(spec, layout)
    shard.check_second_copies(spec, layout)
    float8.check(spec, layout)
    if layout.tensor > 1:
        tensor_parts.check(spec, layout)
    if layout.expert > 1:
        expert_parts.check(spec, layout)
    if layout.pipeline > 1:
        check_cut(spec, layout.stages)


def build(job: Job) -> TorchEngine:
    """Build and wrap the whole model, or this rank's pipeline stages."""
    job, notes = compiling(job)
    layout = job.layout
    device = job.machine.device
    mesh = mesh_of(job)
    say = job.machine.signs.applied
    if layout.tensor > 1:
        splits = vocabulary.note_of(job.spec, layout.tensor), matrices.note_of(job.spec)
        notes = (*filter(None, splits), *notes)
    _check_sparse(job)
    ends, noted = job.machine.ranks.on_first(lambda: fsdp_units.ends_of(job.spec, layout))

    def finish(module: ModelWithLoss, spec: ModelSpec) -> None:
        if layout.zero_stage > 0:
            base = shard.kept_whole(module.model, spec, layout)
            options = shard.options_of(layout, mesh.fsdp, device.type, job.reduction, base)
            with resharding_over(mesh.secondary):
                if layout.expert > 1:
                    expert_ranks.shard(module.model, spec, mesh, options)
                shard.apply(module, spec, ends, options)
            say(sharding_of("FSDP", layout))
        give_values(module.model, spec, layout, job.seed_of_values, device)

    forward_backward: ForwardBackward
    if layout.pipeline > 1:
        stages, cut_note = stages_of_rank(job.spec, job.task, mesh, job.machine.ranks, finish, say)
        check_replicas(stages, mesh, job.machine.ranks)
        forward_backward = PipelineRun(stages, job.task, mesh, device)
        notes = (cut_note, *notes)
    else:
        model, dropout = wrap_blocks(job.spec, job.task, layout, mesh, say=say)
        module = ModelWithLoss(model, job.task)
        finish(module, job.spec)
        check_replicas([module], mesh, job.machine.ranks)
        # FSDP, and `GradientSync` for tensor ranks and sparse models, average gradients themselves
        replicas = layout.replicate > 1 and layout.zero_stage == 0
        by_ddp = replicas and layout.tensor == 1 and not job.sparse
        wrapped: nn.Module = module
        if by_ddp:
            wrapped = _replicated(module, job)
            say(f"DDP over replicate={layout.replicate}")
        forward_backward = GradientAccumulation(wrapped, dropout, layout, job.reduction)
    used = Used(forward_backward.modules, mesh) if job.sparse else None
    return TorchEngine(forward_backward, job, mesh, builder_of(KIND, job), (*notes, *noted), used)


def _check_sparse(job: Job) -> None:
    """Raise ConfigError for sparse parameters under a schedule that sums gradients by itself."""
    layout = job.layout
    splits_backward = layout.pipeline > 1 and layout.schedule.splits_backward
    if job.sparse and splits_backward and layout.zero_stage > 0:
        # such a schedule accumulates gradients itself, unseen by `Used`
        key = "trainer.pipeline_schedule"
        hint = "Use the schedule 1F1B."
        tokens = "tokens that leave parameters without a gradient"
        actual = f"{layout.schedule.name} with ZeRO, and {tokens}"
        raise ConfigError(Problem(key, actual, "a gradient of each", hint))


def _replicated(module: ModelWithLoss, job: Job) -> nn.Module:
    index = job.machine.device.index
    # all ranks have the same buffers already: `RunningStatistics` keeps them so
    with steady_buckets():
        replica = DistributedDataParallel(
            module,
            device_ids=None if index is None else [index],
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
    if job.reduction == torch.bfloat16:
        replica.register_comm_hook(None, bf16_compress_hook)
    return replica


KIND = EngineKind(refusal, in_torch, build, check, ready)
