"""Tensor parallelism (Megatron, arXiv 1909.08053): each block's matrices split over `tensor`.

The model's own plan says which are split and how. Table and head are split over the vocabulary
(`splits/vocabulary.py`). Norms are whole on every tensor rank; they see whole rows, or each rank a
part of the tokens (`splits/sequence.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.distributed.dtensor import local, part_of
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
from trainer.parallel.splits.sequence import TokenParts, with_first


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
    divided = [spec.blocks[at] for at in stage] if mesh.layout.sequence_parallel else []
    if mesh.layout.expert > 1:  # they are divided already
        rest = {n: s for n, s in spec.language.tensor_plan.items() if s != experts.STYLE}
        spec = replace(spec, language=replace(spec.language, tensor_plan=rest))
    split(model, spec, Exchange(mesh.axis("tensor")), partial(part_of, along), divided)
    if vocabulary.whole_because(model, spec, mesh.layout.tensor) is None:
        vocabulary.apply(model, along)


def split(
    model: nn.Module, spec: ModelSpec, ranks: Exchange, part: Part, divided: Sequence[str]
) -> None:
    """Split what the plan names; from the first to the last of the blocks `divided` each rank has a
    part of the tokens.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    sequence = TokenParts(ranks) if divided else None
    regions = {name: terms for name, terms in entered_by(spec).items() if name in modules}
    entries = {name: _Entry(ranks, sequence, terms) for name, terms in regions.items()}
    for name, entry in entries.items():
        modules[name].register_forward_pre_hook(entry.enter, with_kwargs=True)
        modules[name].register_forward_hook(entry.leave, always_call=True)
    for name, style in spec.language.tensor_plan.items():
        if style in STYLES and name in modules:
            around = [entry for at, entry in entries.items() if f"{name}.".startswith(f"{at}.")]
            entry = around[0] if around else _Entry(ranks, sequence, False)
            _split(modules[name], STYLES[style], ranks, part, entry)
        elif style == "colwise" and name in parameters:  # a number of each head
            owner = modules[name.rpartition(".")[0]]
            owner.register_parameter(name.rpartition(".")[2], part(parameters[name], 0))
            replace_forward(owner, partial(_with_parts, owner, owner.forward))
        elif style == experts.STYLE and name in modules:
            experts.apply(modules[name], ranks, part, sequence is not None)
        elif style == HEADS and name in modules:
            divide_heads(modules[name], ranks.group.size())
    if sequence is not None:
        sequence.apply(model, divided)


def _split(layer: Any, style: _Style, ranks: Exchange, part: Part, entry: _Entry) -> None:
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
    forward = _by_columns if style.dim == 0 else _by_rows
    replace_forward(layer, partial(forward, layer, style, ranks, entry))


def _with_parts(
    module: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object
) -> object:
    with has_local_parameters(module):
        return forward(*args, **kwargs)


def _by_columns(
    layer: nn.Linear, style: _Style, ranks: Exchange, entry: _Entry, given: torch.Tensor
) -> torch.Tensor:
    """Return this rank's columns, or all."""
    given = entry.entered(given, style)
    output = _product(layer, given, None if layer.bias is None else local(layer.bias))
    return ranks.gather(output, -1, style.width) if style.whole else output


def _by_rows(
    layer: nn.Linear, style: _Style, ranks: Exchange, entry: _Entry, given: torch.Tensor
) -> torch.Tensor:
    """Return the sum over the ranks, of which one with a part of the sequence keeps that part."""
    given = ranks.scatter(given, -1) if style.whole else given
    with only_summed():
        term = _product(layer, given)
    output = ranks.reduce_from(term) if entry.sequence is None else ranks.reduce_scatter(term, 1)
    return output if layer.bias is None else output + layer.bias


def _product(
    layer: nn.Linear | Conv1D | QuantisedLinear,
    given: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if isinstance(layer, QuantisedLinear):
        return layer.product(given, bias)
    weight = local(layer.weight)
    return F.linear(given, weight.T if isinstance(layer, Conv1D) else weight, bias)


class _Entry:
    """The way of hidden states into a module with split layers: their gradient is summed once.

    With `terms` all that the module computes is a rank's term of what it gives.
    """

    def __init__(self, ranks: Exchange, sequence: TokenParts | None, terms: bool) -> None:
        self._ranks = ranks
        self.sequence = sequence
        self._terms = terms
        self._given: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        def entering(hidden: torch.Tensor) -> torch.Tensor:
            if self.sequence is not None:
                hidden = self.sequence.gather(hidden, self._terms)
            elif self._terms:
                hidden = self._ranks.copy_to(hidden)
            self._given = hidden
            self._entered = hidden if self._terms else None
            return hidden

        return with_first(entering, args, kwargs)

    def leave(self, *_: object) -> None:
        self._given = self._entered = None

    def entered(self, given: torch.Tensor, style: _Style) -> torch.Tensor:
        """Return what a layer gets, once its gradient is summed over the ranks."""
        if self._terms and self._given is not None and not style.whole:
            return given
        if given is not self._given:
            return self._ranks.copy_to(given)
        if self._entered is None:
            self._entered = self._ranks.copy_to(given)
        return self._entered


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
