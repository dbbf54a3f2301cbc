"""Expert parallelism: each rank has some of a layer's routed experts, and tokens travel to theirs.

Tokens go to the ranks of their experts by one all-to-all, and what the experts give comes back by
another (GShard, arXiv 2006.16668). The ranks are neighbours on `shard` x `tensor`; FSDP shards a
rank's experts over the rest. Nothing is dropped: a rank computes as many rows as are sent to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from trainer.distributed.dtensor import part_of
from trainer.distributed.exchange import Exchange
from trainer.models.names import expert_stacks
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.patches import has_experts, replace_forward
from trainer.parallel.shard import FsdpOptions, placement
from trainer.parallel.splits.experts import Part, own_count, take_part


def apply(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> None:
    """Give this rank its part of each stack of experts, on the meta device, in place."""
    assert mesh.experts is not None
    along = mesh.experts["expert"]
    layout = mesh.layout
    part = partial(part_of, along)
    whole_rows = layout.tensor > 1 and not layout.sequence_parallel
    alike = Exchange(mesh.axis("tensor")) if whole_rows else None
    for name in expert_stacks(model, spec.blocks):
        spread(model.get_submodule(name), Exchange(along.get_group()), part, alike)


def spread(experts: nn.Module, ranks: Exchange, part: Part, alike: Exchange | None) -> None:
    """Give each of the `ranks` its experts, and every token to the ranks of those it chose.

    `alike`: ranks that have the same tokens, of which each sends a part.
    """
    take_part(experts, ranks, part)
    routed = partial(_routed, experts, experts.forward, ranks)

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if alike is None:
            return routed(hidden, chosen, weights)
        parts = (alike.scatter(whole, 0) for whole in (hidden, chosen, weights))
        return alike.gather(routed(*parts), 0, len(hidden))

    replace_forward(experts, forward)


def _routed(
    experts: nn.Module,
    forward: Callable[..., torch.Tensor],
    ranks: Exchange,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what all experts give for this rank's tokens: [tokens, width] of [tokens, width].

    `chosen` and `weights`: [tokens, experts of a token].
    """
    size = ranks.group.size()
    count = own_count(experts)
    numbers = chosen.flatten()
    order = numbers.argsort(stable=True)
    counts = numbers.new_zeros(size * count).scatter_add(0, numbers, torch.ones_like(numbers))
    theirs = ranks.move(counts.view(size, count), [1] * size, [1] * size)  # by rank and own expert
    sent, received = split_sizes(counts.view(size, count), theirs, len(order))
    rows = ranks.move(hidden[order // chosen.shape[1]], sent, received)
    weight = ranks.move(weights.flatten()[order], sent, received)
    own = torch.arange(count, device=numbers.device).repeat(size)
    own = own.repeat_interleave(theirs.flatten(), output_size=sum(received))
    if not sum(received):  # one row of zeros: then each parameter has a gradient on each rank
        rows, weight, own = (F.pad(t, [0] * (2 * t.ndim - 1) + [1]) for t in (rows, weight, own))
    with has_experts(experts, count):
        output = forward(rows, own[:, None], weight[:, None])[: sum(received)]
    back = ranks.move(output, received, sent)
    back = torch.empty_like(back).index_copy(0, order, back)
    return back.unflatten(0, chosen.shape).sum(1)


def split_sizes(
    counts: torch.Tensor, theirs: torch.Tensor, rows: int
) -> tuple[list[int], list[int]]:
    """Return how many of this rank's `rows` go to each rank, and come from each: a host read.

    `counts`: [ranks, experts of a rank], and `theirs`, what each rank sends to each expert of this.
    """
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    return sent, received


def shard(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh, options: FsdpOptions) -> None:
    """Make an FSDP unit of each stack of experts, over the ranks that have the same ones.

    Their gradients are sums over the tokens of all ranks that share the experts, as the means of
    other units are, once divided by as many ranks.
    """
    assert mesh.experts is not None
    replicated = mesh.layout.replicate > 1
    axes = ("replicate", "expert_shard") if replicated else "expert_shard"
    shards = mesh.experts["expert_shard"].size()
    own = {"mesh": mesh.experts[axes], "shard_placement_fn": partial(placement, shards)}
    # FSDP2 divides no DTensor again (hpZ)
    again = {"reshard_after_forward": bool(options["reshard_after_forward"])}
    for name in expert_stacks(model, spec.blocks):
        unit: Any = model.get_submodule(name)
        fully_shard(unit, **{**options, **own, **again})
        unit.set_gradient_divide_factor(float(mesh.layout.averaging_ranks))
        # gloo can't divide; a unit of one shard divides before
        unit.set_force_sum_reduction_for_comms(shards > 1)
