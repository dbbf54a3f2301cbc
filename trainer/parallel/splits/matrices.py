"""Tensor parallelism (Megatron, arXiv 1909.08053): each block's matrices split over `tensor`.

The model's own plan says which are split and how. Table and head are split over the vocabulary
(`splits/vocabulary.py`). Norms are whole on every tensor rank; they see whole rows, or each rank a
part of the tokens (`splits/sequence.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.distributed.dtensor import part_of
from trainer.distributed.exchange import Exchange
from trainer.errors import listed
from trainer.layout import Layout
from trainer.models.finetuning.quantised.format import MatrixPart
from trainer.models.finetuning.quantised.quantised_base import QuantisedLinear
from trainer.models.language.tensor_plan import widths
from trainer.models.names import layer_of, outermost, pattern_of
from trainer.models.spec import HEADS, WHOLE, ModelSpec
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.patches import divide_heads, has_local_parameters, replace_forward
from trainer.parallel.recompute.summed import only_summed
from trainer.parallel.splits import experts, vocabulary
from trainer.parallel.splits.experts import Part
from trainer.parallel.splits.region import Backward, Region, product
from trainer.parallel.splits.sequence import TokenParts


class _Style(NamedTuple):
    """A split of a linear layer's matrix along a dimension."""

    dim: int
    whole: bool = False
    """True if what it gives, or gets, is whole."""
    width: int = 0
    """The width of what all ranks give."""


STYLES: dict[str, _Style] = {
    "colwise": _Style(0),
    "rowwise": _Style(1),
    "colwise_gather_output": _Style(0, whole=True),
    "rowwise_split_input": _Style(1, whole=True),
}
"""How linear layers are split, by transformers' names."""
UNSPLIT = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", HEADS, WHOLE)
"""The styles of modules that are no matrix to split; their gradients are known by their place."""


def apply(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh, stage: range) -> None:
    """Split the modules that the plan names, on the meta device, in place.

    `stage` has the numbers of the blocks that this rank will run.
    """
    along = mesh.device_mesh["tensor"]
    blocks = [spec.blocks[at] for at in stage]
    if mesh.layout.expert > 1:  # they are divided already
        rest = {n: s for n, s in spec.language.tensor_plan.items() if s != experts.STYLE}
        spec = replace(spec, language=replace(spec.language, tensor_plan=rest))
    part = partial(part_of, along)
    split(model, spec, mesh.layout, Exchange(mesh.axis("tensor")), part, blocks)
    if vocabulary.whole_because(model, spec, mesh.layout.tensor) is None:
        vocabulary.apply(model, along)


def split(
    model: nn.Module,
    spec: ModelSpec,
    layout: Layout,
    ranks: Exchange,
    part: Part,
    blocks: Sequence[str],
) -> None:
    """Split what the plan names, and with sequence parallelism the tokens within these `blocks`."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    sequence = TokenParts(ranks) if layout.sequence_parallel and blocks else None
    regions = _enter(modules, spec, layout, ranks, sequence)
    for name, style in spec.language.tensor_plan.items():
        if style in STYLES and name in modules:
            around = [region for at, region in regions.items() if f"{name}.".startswith(f"{at}.")]
            region = around[0] if around else Region(ranks, sequence, False, Backward(False, False))
            _split(modules[name], STYLES[style], ranks, part, region)
        elif style == "colwise" and name in parameters:  # a number of each head
            owner = modules[name.rpartition(".")[0]]
            owner.register_parameter(name.rpartition(".")[2], part(parameters[name], 0))
            replace_forward(owner, partial(_with_parts, owner, owner.forward))
        elif style == experts.STYLE and name in modules:
            experts.apply(modules[name], ranks, part, sequence is not None)
        elif style == HEADS and name in modules:
            divide_heads(modules[name], ranks.group.size())
    if sequence is not None:
        sequence.apply(model, blocks)


def _enter(
    modules: Mapping[str, nn.Module],
    spec: ModelSpec,
    layout: Layout,
    ranks: Exchange,
    sequence: TokenParts | None,
) -> dict[str, Region]:
    """Let hidden states enter the modules with split layers, which are returned by name."""
    recomputed = [f"{b}." for n, b in enumerate(spec.blocks) if layout.recompute.chooses(n)]
    regions: dict[str, Region] = {}
    for name, terms in entered_by(spec).items():
        if name not in modules:
            continue
        again = name.startswith(tuple(recomputed))
        overlaps = terms and not layout.schedule.splits_backward
        region = Region(ranks, sequence, terms, Backward(overlaps=overlaps, recomputed=again))
        regions[name] = region
        modules[name].register_forward_pre_hook(region.enter, with_kwargs=True)
        # a module is not left in the usual way where it is recomputed only as far as is needed
        modules[name].register_forward_hook(region.leave, always_call=True)
    return regions


def _split(layer: Any, style: _Style, ranks: Exchange, part: Part, region: Region) -> None:
    style = style._replace(width=widths(layer)[1])
    dim_of_weight = style.dim
    if isinstance(layer, Conv1D):
        dim_of_weight = 1 - style.dim
    elif isinstance(layer, QuantisedLinear):  # the bytes of one part after the other
        dim_of_weight = 0
        layer.divide(MatrixPart(style.dim, ranks.group.rank(), ranks.group.size()))
    layer.register_parameter("weight", part(layer.weight, dim_of_weight))
    if style.dim == 0 and layer.bias is not None:
        layer.register_parameter("bias", part(layer.bias, 0))
    if style.dim == 0 and not style.whole:
        region.layers.append(layer)
    forward = _by_columns if style.dim == 0 else _by_rows
    replace_forward(layer, partial(forward, layer, style, ranks, region))


def _with_parts(
    module: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object
) -> object:
    with has_local_parameters(module):
        return forward(*args, **kwargs)


def _by_columns(
    layer: nn.Linear, style: _Style, ranks: Exchange, region: Region, given: torch.Tensor
) -> torch.Tensor:
    """Return this rank's columns, or all."""
    output = region.columns(layer, region.entered(given, style.whole))
    return ranks.gather(output, -1, style.width) if style.whole else output


def _by_rows(
    layer: nn.Linear, style: _Style, ranks: Exchange, region: Region, given: torch.Tensor
) -> torch.Tensor:
    """Return the sum over the ranks, of which one with a part of the sequence keeps that part."""
    given = ranks.scatter(given, -1) if style.whole else given
    with only_summed():
        term = product(layer, given)
    output = ranks.reduce_from(term) if region.sequence is None else ranks.reduce_scatter(term, 1)
    return output if layer.bias is None else output + layer.bias


def note_of(spec: ModelSpec) -> str | None:
    """Say how a family without a plan of its own is split; None: it has one."""
    model = spec.build()
    plan = spec.language.tensor_plan
    own: dict[str, str] = getattr(model, "tp_plan", {})
    if any(pattern_of(layer_of(name)) in own for name in plan):
        return None
    inside = [name for name in plan if name.startswith(f"{spec.blocks[0]}.")]
    styles = [f"{plan[name]}: {name.removeprefix(spec.blocks[0] + '.')}" for name in inside]
    return f"no tensor plan in transformers; split by the shapes of layers: {listed(styles, 12)}"


def entered_by(spec: ModelSpec) -> dict[str, bool]:
    """Return the modules that hidden states enter whole: those with layers split by columns.

    Where that is a block, they enter its layers. True: what the module computes is a rank's term.
    """
    entered: dict[str, bool] = {}
    for name, style in spec.language.tensor_plan.items():
        layer = layer_of(name)
        region = layer_of(name).rpartition(".")[0]
        if style.startswith("colwise"):
            at = layer if region in spec.blocks else region
            entered[at] = entered.get(at, False) or style == "colwise"
    regions = {
        at: [f"{other}.".startswith(f"{at}.") for other in entered] for at in outermost([*entered])
    }
    return {at: any(compress(entered.values(), inside)) for at, inside in regions.items()}


def has_partial_gradient(spec: ModelSpec, layout: Layout) -> Callable[[str], bool]:
    """Return whether each tensor rank has a term of the gradient of a whole parameter, by name.

    It has where a module sees some heads, or a part of the sequence, or is an adapter's first
    matrix, which a matrix split by columns follows, or an adapter on a stack of experts.
    """
    plan = spec.language.tensor_plan
    stacks = {layer_of(name) for name, style in plan.items() if style == experts.STYLE}
    regions = entered_by(spec)
    inside = tuple(f"{name}." for name in regions)
    terms = tuple(f"{name}." for name, is_term in regions.items() if is_term)
    blocks = tuple(f"{name}." for name in spec.blocks)

    def partial_gradient(name: str) -> bool:
        owner = name.rpartition(".")[0]
        style = plan.get(owner, "")
        if style == WHOLE:
            base = plan[f"{layer_of(owner)}.base_layer"]
            return base == "colwise" or (base.startswith("rowwise") and layout.sequence_parallel)
        if {style, plan.get(name)} & {*STYLES, experts.STYLE}:
            bias = style.startswith("rowwise") and name.endswith(".bias")
            return bias and layout.sequence_parallel
        if layer_of(owner) in stacks:
            return True
        outside = name.startswith(blocks) and not name.startswith(inside)
        return name.startswith(terms) or (outside and layout.sequence_parallel)

    return partial_gradient if layout.tensor > 1 else lambda name: False
