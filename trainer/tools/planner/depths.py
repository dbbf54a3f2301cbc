"""The numbers of blocks that are simulated in place of all of them.

Blocks repeat in many models: all alike (Llama), in groups (Qwen3.5: three of linear attention, one
of full), or after a few others (DeepSeek-V3: dense ones first). What they take is then linear in
the number of repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from trainer.models.spec import ModelSpec
from trainer.tools.planner.simulate import Workload

Shapes = tuple[tuple[str, tuple[int, ...], bool], ...]
"""Name, shape and whether it is trained, of each parameter."""


def depths_of(workload: Workload, model: nn.Module, blocks_of: Sequence[int]) -> list[int] | None:
    """Choose two numbers of blocks per stage to extrapolate from; None to simulate all blocks.

    All are simulated if they don't repeat, if no rank has more than both depths together, if the
    model can't be built with fewer, and in a pipeline if they are not all alike.
    """
    spec = workload.spec
    layout = workload.layout
    if not spec.blocks or spec.tiny.first_blocks is None:
        return None
    first, period = repetition([shapes_of(model.get_submodule(block)) for block in spec.blocks])
    # the blocks before the first repetition, and those that are no whole repetition
    rest = first + (len(spec.blocks) - first) % period
    if layout.pipeline > 1 and (rest, period) != (0, 1):
        return None
    step = math.lcm(layout.recompute.every, period)
    # whole groups of blocks recomputed together; more of them where FSDP2 prefetches
    whole = [-(-least // step) * step for least in (4, 2)]
    few, more = (2 * step, step) if layout.pipeline > 1 else whole
    depths = [rest + few, rest + few + more]
    return depths if max(blocks_of) > sum(depths) * layout.stages_per_rank else None


def are_first(few: ModelSpec, spec: ModelSpec, model: nn.Module) -> bool:
    """Return True if `few` is `model`, which `spec` describes, without its later blocks.

    Some models have other parameters if they are built with fewer blocks: Gemma 4 has a table of
    embeddings whose rows have a part for each block.
    """
    later = tuple(f"{block}." for block in spec.blocks[len(few.blocks) :])
    kept = [shape for shape in shapes_of(model) if not shape[0].startswith(later)]
    return list(shapes_of(few.build())) == kept


def shapes_of(module: nn.Module) -> Shapes:
    """Return the shapes of a module's parameters, sorted by name."""
    named = module.named_parameters()
    return tuple(sorted((name, tuple(p.shape), p.requires_grad) for name, p in named))


def repetition(shapes: Sequence[Shapes]) -> tuple[int, int]:
    """Return the block from which on blocks repeat, and the number of blocks in a repetition.

    Chosen so that the first repetition ends earliest; (0, 1) if all blocks are alike.
    """
    kinds = [shapes.index(shape) for shape in shapes]
    size = len(kinds)
    candidates = []
    for period in range(1, size + 1):
        others = [i for i in range(size - period) if kinds[i] != kinds[i + period]]
        first = others[-1] + 1 if others else 0
        candidates.append((first + period, first, period))
    _, first, period = min(candidates)
    return first, period
