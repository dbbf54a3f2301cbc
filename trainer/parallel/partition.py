"""The blocks of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainer.layout import Partition
from trainer.models.language_model import idle_parameters, text_config
from trainer.models.spec import ModelSpec


def divide(costs: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """Divide blocks into `stages` runs of at least one, so that the costliest stage is cheapest.

    `first` and `last` are the costs of the first and last stage besides their blocks. Among equals,
    the sum of squares is smallest. Raises ValueError for fewer blocks than stages.
    """
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} blocks for {stages} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[b]: (costliest stage, sum of squares, starts of the stages) of the blocks before b
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        left = stages - stage - 1
        best = {
            stop: min(
                (
                    max(dearest, cost := sums[stop] - sums[start] + extra),
                    squares + cost * cost,
                    (*starts, start),
                )
                for start, (dearest, squares, starts) in best.items()
                if start < stop
            )
            for stop in range(stage + 1, len(costs) - left + 1)
        }
    starts = best[len(costs)][2]
    return [
        range(start, stop) for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True)
    ]


def block_ranges(
    model: nn.Module, spec: ModelSpec, partition: Partition, stages: int
) -> list[range]:
    """Return the blocks of each stage.

    `uniform`: equal numbers of blocks. `parameters`: equal numbers of parameters, with the input
    table on the first stage and the head on the last. `best`: equal work, 6 FLOPs a token for each
    parameter in blocks and head, but for those of experts that it is not routed to; a look-up is
    free.
    """
    if partition == "uniform":
        return divide([1.0] * len(spec.blocks), 0.0, 0.0, stages)
    blocks = [model.get_submodule(name) for name in spec.blocks]
    costs = [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    if partition == "best" and spec.language.idle_parameters:
        config = text_config(model)
        costs = [
            cost - idle_parameters(block, config) for cost, block in zip(costs, blocks, strict=True)
        ]
    table = spec.language.embedding_parameters or spec.language.head_parameters
    return divide(
        costs, table if partition == "parameters" else 0.0, spec.language.head_parameters, stages
    )
