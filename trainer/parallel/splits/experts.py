"""Routed experts split over tensor ranks: each has some of them, and computes their tokens alone.

The model's own code passes by what is routed to another rank's expert: transformers gives it the
number behind the last expert, as under its own expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature

import torch
from torch import nn

from trainer.distributed.dtensor import local
from trainer.distributed.exchange import Exchange
from trainer.errors import divided
from trainer.models.spec import ModelSpec
from trainer.parallel.patches import has_experts, replace_forward

Part = Callable[[nn.Parameter, int], nn.Parameter]
"""Returns this rank's part of a whole parameter, along a dimension."""
STYLE = "moe_tp_experts"
"""The style of a module of experts, by transformers' name."""


def apply(experts: nn.Module, ranks: Exchange, part: Part, tokens: bool) -> None:
    """Split the parameters of a module of experts, all of which are stacked over them.

    `tokens`: each rank has a part of the tokens [n, width], and gathers those of all.
    """
    take_part(experts, ranks, part)
    rank = ranks.group.rank()
    size = ranks.group.size()
    plain = experts.forward

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not tokens:
            hidden = ranks.copy_to(hidden)
            weights = ranks.copy_to(weights)
            return ranks.reduce_from(_part(experts, plain, rank, hidden, chosen, weights))
        total = size * len(hidden)
        hidden, weights = (ranks.gather_to(each, 0, total) for each in (hidden, weights))
        given = hidden, ranks.gather(chosen, 0, total), weights
        return ranks.reduce_scatter(_part(experts, plain, rank, *given), 0)

    replace_forward(experts, forward)


def take_part(experts: nn.Module, ranks: Exchange, part: Part) -> None:
    """Give a module of experts this rank's parameters, in place, and say which experts they are."""
    for key, parameter in list(experts.named_parameters(recurse=False)):
        experts.register_parameter(key, part(parameter, 0))
    vars(experts)["first_expert"] = ranks.group.rank() * own_count(experts)


def _part(
    experts: nn.Module, forward: Callable[..., torch.Tensor], rank: int, *given: torch.Tensor
) -> torch.Tensor:
    """Return what the experts of a rank add to the output."""
    (hidden, chosen, weights), count = given, own_count(experts)
    first = rank * count
    own = (chosen >= first) & (chosen < first + count)
    with has_experts(experts, count):
        return forward(hidden, (chosen - first).where(own, count), weights.where(own, 0))


def own_count(experts: nn.Module) -> int:
    """Count the experts of which this rank has the parameters."""
    return len(local(next(experts.parameters(recurse=False))))


def problems(spec: ModelSpec, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield what is seen of experts that can't be split so, and what is expected."""
    modules = dict(spec.build().named_modules())
    named = [name for name, style in spec.language.tensor_plan.items() if style == STYLE]
    for name in named:
        sizes = {len(parameter) for parameter in modules[name].parameters(recurse=False)}
        if len(signature(modules[name].forward).parameters) < 3:  # llama4's: rows in expert order
            yield f"{name} is not given the router's choice", "experts that choose their tokens"
        elif len(sizes) != 1 or any("." in key for key, _ in modules[name].named_parameters()):
            yield f"{name} is no stack of experts", "parameters stacked over the experts"
        elif (size := sizes.pop()) % ranks:
            yield f"{size} experts = {divided(size, ranks)}", f"a multiple of {ranks}"
