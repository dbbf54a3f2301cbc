"""Tensor parallelism (Megatron, arXiv 1909.08053): each block's matrices split over `tensor`.

The model's own plan says which are split and how. Table and head are split over the vocabulary
(`splits/vocabulary.py`). Norms are whole on every tensor rank; they see whole rows, or each rank a
part of the tokens (`splits/sequence.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.distributed.dtensor import local
from trainer.distributed.exchange import Exchange
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.names import layer_of, outermost, pattern_of
from trainer.models.spec import WHOLE, ModelSpec
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.patches import replace_forward
from trainer.parallel.splits import experts, trials, vocabulary
from trainer.parallel.splits.sequence import TokenParts
from trainer.trial.draws import DrawWatch
from trainer.trial.setup import tiny


class _Style(NamedTuple):
    """A split of a linear layer's matrix along a dimension."""

    dim: int
    whole: bool = False
    """True if what it gives, or gets, is whole."""
    inner: bool = False
    """True for an adapter's second matrix: the gradient of what it gets stays a rank's term."""


STYLES: dict[str, _Style] = {
    "colwise": _Style(0),
    "rowwise": _Style(1),
    "colwise_gather_output": _Style(0, whole=True),
    "rowwise_split_input": _Style(1, whole=True),
}
"""How linear layers are split, by transformers' names."""
SUMMED = "replicated_with_grad_allreduce"
"""The style of a module whole on every rank that sees some heads: its gradients are summed."""


def apply(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh, stage: range) -> None:
    """Split the modules that the plan names, on the meta device, in place.

    `stage` has the numbers of the blocks that this rank will run.
    """
    modules, along = dict(model.named_modules()), mesh.device_mesh["tensor"]
    ranks = Exchange(mesh.axis("tensor"))
    sequence = TokenParts(ranks) if mesh.layout.sequence_parallel else None
    entries = {name: _Entry(ranks, sequence) for name in entered_by(spec)}
    for name, entry in entries.items():
        modules[name].register_forward_pre_hook(entry.enter, with_kwargs=True)
        modules[name].register_forward_hook(entry.leave)
    for name, style in spec.language.tensor_plan.items():
        if style in STYLES and name in modules:
            around = next((entries[at] for at in entries if f"{name}.".startswith(f"{at}.")), None)
            inner = around is not None and ".lora_B." in name
            _split(modules[name], STYLES[style]._replace(inner=inner), along, around)
        elif style == experts.STYLE:
            experts.apply(modules[name], along, sequence is not None)
    if sequence is not None:
        sequence.apply(model, [spec.blocks[index] for index in stage])
    if vocabulary.whole_because(model, spec, mesh.layout.tensor) is None:
        vocabulary.apply(model, along)


def _split(layer: nn.Module, style: _Style, mesh: DeviceMesh, entry: _Entry | None) -> None:
    assert isinstance(layer, nn.Linear)
    for key, parameter in list(layer.named_parameters(recurse=False)):
        if style.dim == 0 or key == "weight":
            part = distribute_tensor(parameter.data, mesh, [Shard(style.dim)], src_data_rank=None)
            layer.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))
    ranks = Exchange(mesh.get_group())
    forward = _by_columns if style.dim == 0 else _by_rows
    replace_forward(layer, partial(forward, layer, style, ranks, entry))


def _by_columns(
    layer: nn.Linear, style: _Style, ranks: Exchange, entry: _Entry | None, given: torch.Tensor
) -> torch.Tensor:
    """Return this rank's columns, or all."""
    if not style.inner and (entry is None or given is not entry.entered):
        given = ranks.enter(given)
    bias = None if layer.bias is None else local(layer.bias)
    output = F.linear(given, local(layer.weight), bias)
    return ranks.join(output, -1, layer.out_features) if style.whole else output


def _by_rows(
    layer: nn.Linear, style: _Style, ranks: Exchange, entry: _Entry | None, given: torch.Tensor
) -> torch.Tensor:
    """Return the sum over the ranks, of which one with a part of the sequence keeps that part."""
    given = ranks.divide(given, -1) if style.whole else given
    term = F.linear(given, local(layer.weight))
    parts = entry is not None and entry.sequence is not None
    output = ranks.divide_leaving(term, 1) if parts else ranks.leave(term)
    return output if layer.bias is None else output + layer.bias


class _Entry:
    """The way of hidden states into a module with split layers: their gradient is summed once."""

    def __init__(self, ranks: Exchange, sequence: TokenParts | None) -> None:
        self._ranks, self.sequence = ranks, sequence
        self.entered: torch.Tensor | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()))
        self.entered = (
            self._ranks.enter(given) if self.sequence is None else self.sequence.join(given)
        )
        if args:
            return (self.entered, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self.entered}

    def leave(self, *_: Any) -> None:
        self.entered = None


def entered_by(spec: ModelSpec) -> list[str]:
    """List the modules that hidden states enter whole: those with layers split by columns.

    Where that is a block, they enter its layers.
    """
    found: dict[str, None] = {}
    for name, style in spec.language.tensor_plan.items():
        layer, region = layer_of(name), layer_of(name).rpartition(".")[0]
        if style.startswith("colwise"):
            found[layer if region in spec.blocks else region] = None
    return outermost(list(found))


def has_partial_gradient(spec: ModelSpec, layout: Layout) -> Callable[[str], bool]:
    """Return whether each tensor rank has a term of the gradient of a whole parameter, by name.

    It has where a module sees some heads, or a part of the sequence, or is an adapter's first
    matrix, which a matrix split by columns follows.
    """
    plan = spec.language.tensor_plan
    inside = tuple(f"{name}." for name in entered_by(spec))
    blocks = tuple(f"{name}." for name in spec.blocks)

    def partial_gradient(name: str) -> bool:
        style = plan.get(name.rpartition(".")[0], "")
        if style == WHOLE:
            base = plan[f"{layer_of(name.rpartition('.')[0])}.base_layer"]
            return base.startswith("colwise") or layout.sequence_parallel
        if style == SUMMED or not layout.sequence_parallel:
            return style == SUMMED
        outside = name.startswith(blocks) and not name.startswith(inside)
        return outside and not style or (style.startswith("rowwise") and name.endswith(".bias"))

    return partial_gradient if layout.tensor > 1 else lambda name: False


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that `layout.tensor` ranks can't train exactly."""
    place = f"tensor_parallel.autotp_size: {spec.name}"
    hint = "Change tensor_parallel.autotp_size; 1 trains every model."
    problems = dict.fromkeys(
        Problem(place, re.sub(r"\.\d+\.", ".*.", seen), expected, hint)
        for seen, expected in _problems(spec, layout)
    )
    if not problems and layout.sequence_parallel:
        place = f"tensor_parallel.sequence_parallel: {spec.name}"
        hint = "Set it to false: each rank then works on whole rows between the split matrices."
        found = list(trials.undivided(spec, entered_by))
        if spec.language.own_loss:
            found.append("the model adds a loss over all tokens of its own")
        problems = {
            Problem(place, seen, "work on each token by itself", hint): None for seen in found
        }
    if problems:
        raise ConfigError(*problems)


def _problems(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    plan, size = spec.language.tensor_plan, layout.tensor
    modules = dict(spec.build().named_modules())
    if not plan:
        yield "its family has no tensor plan in transformers", "a model with `base_model_tp_plan`"
    for name, style in plan.items():
        module = modules.get(name)
        if style in (WHOLE, experts.STYLE) or plan.get(name.rpartition(".")[0]) == experts.STYLE:
            continue
        if style != SUMMED and (style not in STYLES or type(module) is not nn.Linear):
            yield (
                f"{name} is to be split as {style!r}",
                f"linear layers, split as one of {', '.join(STYLES)}",
            )
        elif isinstance(module, nn.Linear):
            what = "in_features" if style.startswith("rowwise") else "out_features"
            width = getattr(module, what)
            if width % size:
                seen = f"{name}.{what} = {width} = {width // size} x {size} + {width % size}"
                yield seen, f"a multiple of {size}"
    yield from experts.problems(spec, size)
    regions = dict.fromkeys(_region(name) for name, style in plan.items() if style == "colwise")
    if any("att" in region for region in regions):
        counts = {
            "attention heads": spec.language.heads,
            "key-value heads": spec.language.kv_heads,
        }
        for what, heads in counts.items():
            if heads % size:
                seen = f"{heads} {what} = {heads // size} x {size} + {heads % size}"
                yield seen, f"a multiple of {size}"
    drawing = _drawing(spec) if plan else set()
    for region in regions:
        yield from _inside(region, modules[region], spec)
        if pattern_of(region) in drawing:
            seen = (
                f"{region} draws random numbers (dropout) inside what is split: each rank would "
                "draw others than one process"
            )
            yield seen, "a model config without that dropout"
    if plan and all(name in modules for name in entered_by(spec)):
        for name in trials.bypassed(spec, entered_by):
            yield f"{name} uses its input beside the layers that are split", "no other use of it"


def _region(name: str) -> str:
    """Return the module in which a layer's matrix is split."""
    return layer_of(name).rpartition(".")[0]


def _inside(name: str, region: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield parameters that see a part of the activations and are not in the plan."""
    for key, _ in region.named_parameters():
        owner = f"{name}.{key}".rpartition(".")[0]
        if owner not in spec.language.tensor_plan:
            yield (
                f"{name}.{key} works on a part of the activations, and the plan does not say how",
                "a plan for it",
            )


def _drawing(spec: ModelSpec) -> set[str]:
    """Find the patterns of modules that draw random numbers between split matrices.

    Tried on a tiny copy. Draws for the residual stream are the same on all ranks, by their seed.
    """
    small, model = tiny(spec)
    place = ""

    def move(to: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            nonlocal place
            place = to

        return hook

    modules = dict(model.named_modules())
    for name, style in small.language.tensor_plan.items():
        if style in ("colwise", "rowwise") and name in modules:
            region = pattern_of(_region(name)) if style == "colwise" else ""
            modules[name].register_forward_hook(move(region))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), DrawWatch(lambda: place) as watch:
        model.train()(
            input_ids=torch.arange(1, 9)[None] % small.language.vocabulary, use_cache=False
        )
    return watch.places
