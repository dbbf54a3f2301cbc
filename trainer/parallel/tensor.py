"""Tensor parallelism (Megatron, arXiv 1909.08053): each block's matrices split over `tensor`.

The model's own plan says which are split and how; PyTorch's DTensor styles do it. Table and head
are split over the vocabulary (`vocabulary.py`). Norms are whole on every tensor rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.names import layer_of, pattern_of
from trainer.models.spec import WHOLE, ModelSpec
from trainer.parallel import vocabulary
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.trial.draws import DrawWatch
from trainer.trial.setup import tiny

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}
"""DTensor styles by transformers' names."""
SUMMED = "replicated_with_grad_allreduce"
"""The style of a module whole on every rank that sees some heads: its gradients are summed."""


def apply(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> None:
    """Split the modules that the plan names, on the meta device, in place."""
    modules = dict(model.named_modules())
    for name, style in spec.language.tensor_plan.items():
        if style in STYLES and name in modules:
            parallelize_module(
                modules[name], mesh.device_mesh["tensor"], STYLES[style](), src_data_rank=None
            )
    if vocabulary.whole_because(model, spec, mesh.layout) is None:
        vocabulary.apply(model, mesh.device_mesh["tensor"])


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that `layout.tensor` ranks can't train exactly."""
    place = f"tensor_parallel.autotp_size: {spec.name}"
    hint = "Change tensor_parallel.autotp_size; 1 trains every model."
    problems = dict.fromkeys(
        Problem(place, re.sub(r"\.\d+\.", ".*.", seen), expected, hint)
        for seen, expected in _problems(spec, layout)
    )
    if problems:
        raise ConfigError(*problems)


def _problems(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    plan, size = spec.language.tensor_plan, layout.tensor
    modules = dict(spec.build().named_modules())
    if not plan:
        yield "its family has no tensor plan in transformers", "a model with `base_model_tp_plan`"
    for name, style in plan.items():
        module = modules.get(name)
        if style == WHOLE:
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
