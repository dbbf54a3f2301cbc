"""Megatron-style tensor parallelism (arXiv 1909.08053): each block's matrices split over the
`tensor` axis.

The model's own plan says which are split and how; PyTorch's DTensor styles do it. Embedding, norms
and head are whole on every tensor rank, and have the same values there.
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
"""The style of a module that is whole on every rank but sees a part of the heads: its gradients
must be summed.
"""


def apply(model: nn.Module, spec: ModelSpec, mesh: ParallelMesh) -> None:
    """Split the modules that the plan names, of a model on the meta device, in place; no parameter
    changes its name.
    """
    modules = dict(model.named_modules())
    for name, style in spec.language.tensor_plan.items():
        if style in STYLES and name in modules:
            parallelize_module(
                modules[name], mesh.device_mesh["tensor"], STYLES[style](), src_data_rank=None
            )


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError, with each reason once, for a model that `layout.tensor` ranks can't train
    exactly.
    """
    mend = "Change tensor_parallel.autotp_size; 1 trains every model."
    found = dict.fromkeys(
        (re.sub(r"\.\d+\.", ".*.", seen), expected) for seen, expected in _problems(spec, layout)
    )
    if found:
        place = f"tensor_parallel.autotp_size: {spec.name}"
        raise ConfigError(*(Problem(place, seen, expected, mend) for seen, expected in found))


def _problems(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    plan, size, modules = (
        spec.language.tensor_plan,
        layout.tensor,
        dict(spec.build().named_modules()),
    )
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
            if (width := getattr(module, what)) % size:
                yield (
                    f"{name}.{what} = {width} = {width // size} x {size} + {width % size}",
                    f"a multiple of {size}",
                )
    regions = dict.fromkeys(_region(name) for name, style in plan.items() if style == "colwise")
    if any("att" in region for region in regions):
        for heads, what in (
            (spec.language.heads, "attention heads"),
            (spec.language.kv_heads, "key-value heads"),
        ):
            if heads % size:
                yield (
                    f"{heads} {what} = {heads // size} x {size} + {heads % size}",
                    f"a multiple of {size}",
                )
    drawing = _drawing(spec) if plan else set()
    for region in regions:
        yield from _inside(region, modules[region], spec)
        if pattern_of(region) in drawing:
            seen = (
                f"{region} draws random numbers (dropout) inside what is split: each rank "
                "would "
                "draw others than one"
            )
            yield f"{seen} process", "a model config without that dropout"


def _region(name: str) -> str:
    """Return the module in which a layer's matrix is split."""
    return layer_of(name).rpartition(".")[0]


def _inside(name: str, region: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield parameters between split matrices that work on a part of the activations and are not in
    the plan.
    """
    for key, _ in region.named_parameters():
        owner = f"{name}.{key}".rpartition(".")[0]
        if owner not in spec.language.tensor_plan:
            yield (
                f"{name}.{key} works on a part of the activations, and the plan does not say how",
                "a plan for it",
            )


def _drawing(spec: ModelSpec) -> set[str]:
    """Find the modules, by pattern, that draw random numbers between split matrices in training.

    Tried on a tiny copy. Draws for the residual stream are the same on all ranks, which have the
    same seed.
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
