"""The order in which a model on the meta device is wrapped, with the reason for each position.

1. the task turns the head into one that returns the loss: later steps wrap modules, which have
   their final class by then; biases of routers that are to move become buffers, which no step
   below divides or rounds;
2. large linear layers, and the head if it is to, multiply in float8; expert parallelism divides
   experts, tensor parallelism splits matrices, in float8 or not: FSDP then shards what each of
   their ranks has, and a recomputed block runs its collectives again;
3. MLPs compute in tiles of tokens, inside the hooks that join rows for the split matrices; then
   activation checkpointing wraps the forward of blocks: outside both, inside the hooks of dropout
   and FSDP, so that recomputing gathers and seeds nothing twice;
4. `torch.compile` takes the forward of each block: after checkpointing, which it has to trace, and
   inside the hooks of dropout and FSDP, which it must not trace;
5. dropout's hooks seed each block by its place in the model: outside the recomputed forward, which
   restores the generators;
6. the cut keeps a pipeline stage's own blocks, with all that was done to them;
7. FSDP shards block by block, then embedding and head, then the rest: on the meta device, so that
   no rank ever holds the whole model;
8. values: each rank makes or reads its shard alone.

DDP comes last, since it sends real values. DeepSpeed replaces 7 and 8, and 2 for matrices: its
AutoTP splits real values, and its ZeRO-3 partitions each unit as it is made, and gathers an MLP in
tiles as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from trainer.distributed.ranks import Ranks
from trainer.layout import Layout
from trainer.models.cut import cut
from trainer.models.materialise import Placement, materialise
from trainer.models.spec import ModelSpec
from trainer.parallel import compilation, float8, partition
from trainer.parallel.forward_backward import Dropout
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.pipeline import Stage
from trainer.parallel.recompute import activation_checkpointing
from trainer.parallel.splits import expert_loads, expert_ranks, matrices
from trainer.probes.questions.stages import check_cut
from trainer.tasks.task import Task

Say = Callable[[str], None]


def say_nothing(line: str) -> None:
    """Print no line, as where a model is wrapped to be tried."""


def wrap_blocks(
    spec: ModelSpec,
    task: Task,
    layout: Layout,
    mesh: ParallelMesh | None = None,
    stage: range | None = None,
    say: Say = say_nothing,
) -> tuple[nn.Module, Dropout]:
    """Return the model on the meta device after steps 1 to 5, and its dropout.

    Step 2 needs `mesh`, and tensor parallelism the blocks of this `stage`, if they are not all.
    `say` is called with a line for each step that is taken.
    """
    model = task.prepare(spec.build())
    if layout.router_bias_rate:
        expert_loads.hold(model, spec)
    if mesh is not None and layout.float8 != "none":
        float8.apply(model, spec, layout, mesh.device_mesh.device_type)
        head = " and the head" if layout.float8_head else ""
        say(f"float8 ({layout.float8}) to large linear layers{head}")
    if mesh is not None and layout.expert > 1:
        expert_ranks.apply(model, spec, mesh)
        say(f"expert parallelism over expert={layout.expert}")
    if mesh is not None and layout.tensor > 1:
        matrices.apply(model, spec, mesh, stage or range(len(spec.blocks)))
        say(f"tensor parallelism over tensor={layout.tensor}")
    parts = layout.tensor if layout.sequence_parallel else 1
    activation_checkpointing.apply(model, spec, layout.recompute, parts)
    if layout.recompute.tile:
        say(f"tiles of {layout.recompute.tile} tokens to MLPs")
    if layout.recompute.mode != "none":
        say(f"activation checkpointing ({layout.recompute}) to {len(spec.blocks)} blocks")
    if layout.compile in ("blocks", "loss"):
        blocks = layout.compile == "blocks"
        compilation.apply(model, spec, blocks=blocks, layout=layout)
        say(
            f"torch.compile to {len(spec.blocks)} blocks" if blocks else "torch.compile to the loss"
        )
    return model, Dropout(model, spec)


def sharding_of(name: str, layout: Layout) -> str:
    """Return a line on which ranks a library's wrapper shards over, and replicates over."""
    axes = {"shard": layout.shard, "replicate": layout.replicate}
    sizes = [f"{axis}={size}" for axis, size in axes.items() if size > 1] or ["shard=1"]
    again = f", gathered again over {layout.regathered}" if layout.regathered else ""
    return f"{name} over {', '.join(sizes)}{again}"


def stages_of_rank(
    spec: ModelSpec,
    task: Task,
    mesh: ParallelMesh,
    ranks: Ranks,
    finish: Callable[[Stage, ModelSpec], None],
    say: Say = say_nothing,
) -> tuple[list[Stage], str]:
    """Build the stages of this rank by steps 1 to 6, and a note on the cut. Collective.

    `finish` gives a stage its values; it is called with a spec that has the stage's blocks alone.
    """
    layout = mesh.layout
    boundary = ranks.on_first(lambda: check_cut(spec, layout.stages))
    ranges = partition.block_ranges(spec.build(), spec, layout.schedule, layout.stages)
    stages = []
    for index in mesh.stages:
        model, dropout = wrap_blocks(spec, task, layout, mesh, ranges[index], say)
        stage_input = cut(model, spec, boundary, ranges[index])
        last = index + 1 == layout.stages
        stage = Stage(model, task, stage_input, dropout, ranges[index], last=last)
        finish(stage, replace(spec, blocks=tuple(spec.blocks[i] for i in ranges[index])))
        stages.append(stage)
    say(f"a cut into stages over pipeline={layout.pipeline}")
    blocks = " | ".join(str(len(blocks)) for blocks in ranges)
    bubble = layout.schedule.bubble(layout.accumulation, layout.pipeline)
    idle = f"idle for about {bubble:.0%} of a step by {layout.schedule.name}"
    return stages, f"{layout.stages} pipeline stages of {blocks} blocks; {idle}"


def give_values(
    model: nn.Module, spec: ModelSpec, layout: Layout, seed: int, device: torch.device
) -> None:
    """Run step 8: materialise this rank's parameters; offloaded ones stay on the host.

    The base of an adapter is kept in the precision in which it computes.
    """
    storage = torch.device("cpu") if layout.offloads else device
    dtype = getattr(torch, layout.updated)
    base = getattr(torch, layout.precision)
    placement = Placement(device, dtype, storage, base)
    materialise(model, spec, seed=seed, placement=placement)
