"""Megatron-style tensor parallelism (arXiv 1909.08053): each block's matrices split over the `tensor` axis.

Which are split and how is the model's own plan, followed with PyTorch's DTensor styles. Embedding, norms and head are
whole on every tensor rank, and see the same values there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.parallel.mesh import Grid

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}
"""By transformers' names for them."""
SUMMED = "replicated_with_grad_allreduce"
"""The style of a module that is whole on every rank and sees but a part of the heads: gradients are to be summed."""


def apply(model: nn.Module, spec: ModelSpec, grid: Grid) -> None:
    """Split what the plan names of a model on the meta device, in place; no parameter changes its name."""
    modules = dict(model.named_modules())
    for name, style in spec.tensor_plan.items():
        if style in STYLES and name in modules:
            parallelize_module(modules[name], grid.mesh["tensor"], STYLES[style](), src_data_rank=None)


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raises ConfigError, with each reason once, for a model that `layout.tensor` ranks can't train exactly."""
    mend = "Change tensor_parallel.autotp_size; 1 trains every model."
    found = dict.fromkeys((re.sub(r"\.\d+\.", ".*.", seen), expected) for seen, expected in _problems(spec, layout))
    if found:
        place = f"tensor_parallel.autotp_size: {spec.name}"
        raise ConfigError(*(Problem(place, seen, expected, mend) for seen, expected in found))


def _problems(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    plan, size, modules = spec.tensor_plan, layout.tensor, dict(spec.build().named_modules())
    if not plan:
        yield "its family has no tensor plan in transformers", "a model with `base_model_tp_plan`"
    for name, style in plan.items():
        module = modules.get(name)
        if style != SUMMED and (style not in STYLES or type(module) is not nn.Linear):
            yield f"{name} is to be split as {style!r}", f"linear layers, split as one of {', '.join(STYLES)}"
        elif isinstance(module, nn.Linear):
            what = "in_features" if style.startswith("rowwise") else "out_features"
            if (width := getattr(module, what)) % size:
                yield f"{name}.{what} = {width} = {width // size} x {size} + {width % size}", f"a multiple of {size}"
    regions = dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == "colwise")
    if any("att" in region for region in regions):
        for heads, what in ((spec.heads, "attention heads"), (spec.kv_heads, "key-value heads")):
            if heads % size:
                yield f"{heads} {what} = {heads // size} x {size} + {heads % size}", f"a multiple of {size}"
    for region in regions:
        yield from _inside(region, modules[region], spec)


def _inside(name: str, region: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """What stands between split matrices, sees a part of the activations, and is not in the plan."""
    for key, _ in region.named_parameters():
        owner = f"{name}.{key}".rpartition(".")[0]
        if owner not in spec.tensor_plan:
            yield f"{name}.{key} works on a part of the activations, and the plan does not say how", "a plan for it"
    values = {key: value for key, value in vars(region).items() if isinstance(value, float)}
    values |= {key: child.p for key, child in region.named_modules() if isinstance(child, nn.Dropout)}
    for key, value in values.items():
        # what is dropped from the residual stream is the same on all ranks: they have the same seed
        if "drop" in key and not key.startswith("resid") and value > 0:
            seen = f"{name}.{key} = {value:g}, inside what is split: each rank would drop other values than one process"
            yield seen, "0"
