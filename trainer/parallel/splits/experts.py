"""Routed experts split over tensor ranks: each has some of them, and computes their tokens alone.

The model's own code passes by what is routed to another rank's expert: transformers gives it the
number behind the last expert, as under its own expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.distributed.dtensor import local
from trainer.distributed.exchange import Exchange
from trainer.errors import named_line
from trainer.models.names import pattern_of
from trainer.models.spec import ModelSpec
from trainer.parallel.patches import has_experts, replace_forward
from trainer.trial.setup import row_of, tiny

STYLE = "moe_tp_experts"
"""The style of a module of experts, by transformers' name."""
TOLERANCE = 1e-4


def apply(experts: nn.Module, mesh: DeviceMesh, parts: bool) -> None:
    """Split the parameters of a module of experts, all of which are stacked over them.

    `parts`: each rank has a part of the tokens [n, width], and gathers those of all.
    """
    for key, parameter in list(experts.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))
    ranks, rank, plain = Exchange(mesh.get_group()), mesh.get_local_rank(), experts.forward

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parameters = {key: local(value) for key, value in experts.named_parameters(recurse=False)}
        first = rank * len(next(iter(parameters.values())))
        if not parts:
            hidden, weights = ranks.enter(hidden), ranks.enter(weights)
            return ranks.leave(_part(experts, plain, parameters, first, hidden, chosen, weights))
        total = mesh.size() * len(hidden)
        hidden, weights = (ranks.join_entering(each, 0, total) for each in (hidden, weights))
        given = hidden, ranks.join(chosen, 0, total), weights
        return ranks.divide_leaving(_part(experts, plain, parameters, first, *given), 0)

    replace_forward(experts, forward)


def _part(
    experts: nn.Module,
    forward: Callable[..., torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    first: int,
    *given: torch.Tensor,
) -> torch.Tensor:
    """Return what some experts from `first` on, with these parameters, add to the output."""
    (hidden, chosen, weights), count = given, len(next(iter(parameters.values())))
    own = (chosen >= first) & (chosen < first + count)
    with has_experts(experts, parameters, count):
        return forward(hidden, (chosen - first).where(own, count), weights.where(own, 0))


def problems(spec: ModelSpec, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield what is seen of experts that can't be split so, and what is expected.

    The parts' sum and its gradients are compared with the whole's, on a tiny copy.
    """
    modules = dict(spec.build().named_modules())
    named = [name for name, style in spec.language.tensor_plan.items() if style == STYLE]
    for name in named:
        sizes = {len(parameter) for parameter in modules[name].parameters(recurse=False)}
        if len(sizes) != 1 or any("." in key for key, _ in modules[name].named_parameters()):
            yield f"{name} is no stack of experts", "parameters stacked over the experts"
        elif (size := sizes.pop()) % ranks:
            seen = f"{size} experts = {size // ranks} x {ranks} + {size % ranks}"
            yield seen, f"a multiple of {ranks}"
    if not named:
        return
    small, model = tiny(spec)
    found: dict[str, None] = {}

    def compare(experts: nn.Module, given: Any, output: torch.Tensor, *, name: str) -> None:
        parameters = dict(experts.named_parameters(recurse=False))
        size = len(next(iter(parameters.values())))
        halves = []
        for first, stop in ((0, size // 2), (size // 2, size)):
            own = {key: value[first:stop] for key, value in parameters.items()}
            halves.append(
                _part(experts, type(experts).forward.__get__(experts), own, first, *given)
            )
        inputs, total = [given[0], given[2], *parameters.values()], halves[0] + halves[1]
        for ours, theirs in zip(
            [total, *_gradients(total, inputs)],
            [output, *_gradients(output, inputs)],
            strict=True,
        ):
            if not torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
                found[f"{pattern_of(name)} gives another sum in parts"] = None

    for name, style in small.language.tensor_plan.items():
        if style == STYLE:
            model.get_submodule(name).register_forward_hook(partial(compare, name=name))
    try:
        model.eval()(input_ids=row_of(small)[None], use_cache=False)
    except Exception as error:  # whatever a model's own code raises
        found[f"its experts fail in parts: {named_line(error)}"] = None
    for seen in found:
        yield seen, "experts whose parts add up to the whole"


def _gradients(output: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(output.sin().sum(), inputs, retain_graph=True, allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]
