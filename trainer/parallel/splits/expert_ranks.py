"""Expert parallelism: each rank has some of a layer's routed experts, and tokens travel to theirs.

Tokens go to the ranks of their experts by one all-to-all, and what the experts give comes back by
another (GShard, arXiv 2006.16668). A token goes once to each rank, however many of its experts are
there: the rank copies it for them, and sends back one sum. The ranks are neighbours on `shard` x
`tensor`; FSDP shards a rank's experts over the rest. Nothing is dropped: a rank computes as many
rows as are sent to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from trainer.parallel.shard import FsdpOptions, placement, reduce_in_one_buffer
from trainer.parallel.splits.experts import Part, own_count, take_part
from trainer.parallel.splits.row_copies import RowCopies, picked, starts_of


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
    pairs = chosen.new_zeros(len(chosen), size)  # of a token and an expert, [tokens, ranks]
    pairs = pairs.scatter_add(1, chosen // count, torch.ones_like(chosen))
    goes = pairs > 0
    ours = torch.stack([goes.sum(0), pairs.sum(0)], 1)
    theirs = ranks.move(ours, [1] * size, [1] * size)
    sizes = split_sizes(ours, theirs, chosen, size * count)
    sent = sizes.sent, sizes.received
    tokens = _by_rank(goes, sum(sizes.sent))
    # a row has all of its token's numbers and weights: few bytes beside a hidden state
    rows, weight = (ranks.move(tokens.expand(given), *sent) for given in (hidden, weights))
    numbers = ranks.move(chosen.int().index_select(0, tokens.rows), *sent)
    own = numbers - ranks.group.rank() * count
    with has_experts(experts, count):
        output = _computed(forward, (own >= 0) & (own < count), sizes.pairs, rows, own, weight)
    return tokens.sum(ranks.move(output, *sent[::-1]))


def _by_rank(goes: torch.Tensor, total: int) -> RowCopies:
    """Return the copies of tokens that go to ranks, in the order of the ranks.

    `goes`: True where a token goes to a rank, [tokens, ranks]; so it is `total` times.
    """
    by_rank = goes.t()
    tokens = torch.arange(len(goes), device=goes.device).expand(by_rank.shape)
    places = by_rank.flatten().cumsum(0).view(by_rank.shape) - 1
    by_token = picked(places.t(), goes, total)
    return RowCopies(picked(tokens, by_rank, total), by_token, starts_of(goes))


def _computed(
    forward: Callable[..., torch.Tensor],
    own: torch.Tensor,
    total: int,
    hidden: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what this rank's experts add to the rows that were sent to it: [rows, width].

    `own`: True for a row's experts on this rank, [rows, experts of a token]; so it is `total`
    times. `numbers` and `weights` are of the same experts, and have its shape.
    """
    places = torch.arange(own.numel(), device=own.device)
    pairs = picked(places, own, total)
    copies = RowCopies(pairs // own.shape[1], places[:total], starts_of(own))
    rows = copies.expand(hidden)
    number, weight = (each.flatten().index_select(0, pairs)[:, None] for each in (numbers, weights))
    if not total:  # one row of zeros: then each parameter has a gradient on each rank
        rows, number, weight = (F.pad(each, (0, 0, 0, 1)) for each in (rows, number, weight))
    return copies.sum(forward(rows, number.long(), weight)[:total])


class SplitSizes(NamedTuple):
    """Numbers of rows that a rank sends and receives for a layer of experts."""

    sent: list[int]
    """The rows that go to each rank: a row is a token, sent once to each rank of its experts."""
    received: list[int]
    """The rows that come from each."""
    pairs: int
    """The pairs of a received row and an expert of this rank."""


def split_sizes(
    ours: torch.Tensor, theirs: torch.Tensor, chosen: torch.Tensor, experts: int
) -> SplitSizes:
    """Return the sizes of a layer's exchanges: a host read.

    `ours` and `theirs`: the rows, and the pairs of them and experts, that go to each rank and come
    from each, [ranks, 2]. A simulation takes what is expected for so many `experts`, and for the
    shape of `chosen` [tokens, experts of a token].
    """
    sent, received, pairs = torch.stack([ours[:, 0], *theirs.t()]).tolist()
    return SplitSizes(sent, received, sum(pairs))


def shard(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh, options: FsdpOptions) -> None:
    """Make an FSDP unit of each stack of experts, over the ranks that have the same ones.

    Their gradients are sums over the tokens of all ranks that share the experts, as the means of
    other units are, once divided by as many ranks.
    """
    assert mesh.experts is not None
    replicated = mesh.layout.replicate > 1
    axes = ("replicate", "expert_shard") if replicated else "expert_shard"
    over = mesh.experts[axes]
    shards = mesh.experts["expert_shard"].size()
    own = {
        "mesh": over,
        "shard_placement_fn": partial(placement, shards),
        # FSDP2 divides no DTensor again (hpZ)
        "reshard_after_forward": bool(options["reshard_after_forward"]),
    }
    for name in expert_stacks(model, spec.blocks):
        unit: Any = model.get_submodule(name)
        fully_shard(unit, **{**options, **own})
        unit.set_gradient_divide_factor(float(mesh.layout.averaging_ranks))
        # gloo can't divide; a unit of one shard divides before
        unit.set_force_sum_reduction_for_comms(shards > 1)
        reduce_in_one_buffer([unit], over)
