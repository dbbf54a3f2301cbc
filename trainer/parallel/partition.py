"""The blocks of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from trainer.errors import Raised, attempt
from trainer.layout import PipelineSchedule
from trainer.models.language_model import idle_parameters, text_config
from trainer.models.spec import ModelSpec
from trainer.probes.dispatch_modes import HostReads

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

COUNTED = 32
"""The tokens of the row on which a model's attention is counted."""


def divide(costs: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """Divide blocks into `stages` runs of at least one, so that the costliest stage is cheapest.

    `first` and `last` are the costs of the first and last stage besides their blocks. Among equals,
    the sum of squares is smallest. Raises ValueError for fewer blocks than stages.
    """
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} blocks for {stages} stages")
    sums = list(accumulate(costs, initial=0.0))
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
    return [range(*ends) for ends in pairwise([*best[len(costs)][2], len(costs)])]


def block_ranges(
    model: nn.Module, spec: ModelSpec, schedule: PipelineSchedule, stages: int
) -> list[range]:
    """Return the blocks of each stage.

    `uniform`: equal numbers of blocks. `parameters`: equal numbers of parameters, with the input
    table on the first stage and the head on the last. `best`: equal work, 6 FLOPs a token for each
    parameter in blocks and head, but for those of experts that it is not routed to, and attention
    over rows of `schedule.row` tokens; a look-up is free.
    """
    if stages == 1:
        return [range(len(spec.blocks))]
    partition = schedule.partition
    head = spec.language.head.parameters
    if partition == "uniform":
        return divide([1.0] * len(spec.blocks), 0.0, 0.0, stages)
    blocks = [model.get_submodule(name) for name in spec.blocks]
    costs = [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    if partition == "parameters":
        return divide(costs, spec.language.embedding_parameters or head, head, stages)
    if spec.language.idle_parameters:
        idle = (idle_parameters(block, text_config(model)) for block in blocks)
        costs = [cost - unused for cost, unused in zip(costs, idle, strict=True)]
    if spec.language.attention.width:
        attention = _attention(spec, text_config(model), schedule.row)
        costs = [cost + work for cost, work in zip(costs, attention, strict=True)]
    return divide(costs, 0.0, head, stages)


def _attention(spec: ModelSpec, config: PreTrainedConfig, row: int) -> list[float]:
    """Return the work of each block's attention in a sequence: as many parameters would be as much.

    It is what grows with the square of its length, counted on two short sequences; none where a
    model does not run without values.
    """
    counts = counted(spec)
    if isinstance(counts, Raised):
        return [0.0] * len(spec.blocks)
    once, twice = counts
    kinds = getattr(config, "layer_types", None) or ()
    kinds = kinds if len(kinds) == len(once) else ["sliding_attention"] * len(once)
    window = min(getattr(config, "sliding_window", None) or row, row)
    chunk = min(getattr(config, "attention_chunk_size", None) or row, row)
    # the mean number of tokens that a token sees
    lengths = {"sliding_attention": window - window**2 / (2 * row), "chunked_attention": chunk / 2}
    squares = [max(0, b - 2 * a) / (2 * COUNTED**2) for a, b in zip(once, twice, strict=True)]
    return [q / 2 * lengths.get(kind, row / 2) for q, kind in zip(squares, kinds, strict=True)]


def counted(spec: ModelSpec) -> tuple[list[int], list[int]] | Raised:
    """Count the FLOPs of each block on a sequence of COUNTED tokens, and on one twice as long."""
    return attempt(lambda: (_flops(spec, COUNTED), _flops(spec, 2 * COUNTED)))


def _flops(spec: ModelSpec, row: int) -> list[int]:
    """Count the FLOPs of each block's forward pass for one row, on the meta device.

    Not on fake tensors: after those no forked process can run a backward pass.
    """
    with _disable_current_modes(), torch.device("meta"), torch.no_grad():
        model = spec.build()
        with HostReads(), FlopCounterMode(display=False) as counter:
            model(input_ids=torch.zeros(1, row, dtype=torch.int64), use_cache=False)
    counts = counter.get_flop_counts()
    root = type(model).__name__
    return [sum(counts[f"{root}.{name}"].values()) for name in spec.blocks]
