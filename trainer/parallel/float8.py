"""float8 matrix products by torchao (`trainer.float8`), in the large linear layers of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.distributed.dtensor import local
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.storage import imported, installed

LEAST = 1024
"""The least width of a layer: for smaller ones casts may take longer than float8 saves."""
MULTIPLE = 16
"""The kernels take multiples of it."""


def refusal(layout: Layout) -> str | None:
    """Return the reason why a layout can't have float8, or None."""
    if layout.float8 == "none":
        return None
    if not installed("torchao"):
        return "trainer.float8 needs torchao (pip install 'meshloom[float8]')."
    if layout.zero_stage == 0 or layout.offloads:
        return "trainer.float8 is for weights that ZeRO shards and keeps on the device."
    if layout.tensor > 1 and layout.float8 == "tensorwise":
        tensors = "tensors that tensor parallelism can't split"
        return f'Weights are gathered in float8 as {tensors}. Set trainer.float8 to "rowwise".'
    return None


def layers(model: nn.Module, spec: ModelSpec, layout: Layout) -> list[str]:
    """List the linear layers of blocks that are trained and of sizes that gain by float8.

    Their sizes are those of a tensor rank's part.
    """
    blocks = tuple(f"{name}." for name in spec.blocks)
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name.startswith(blocks)
        and module.weight.requires_grad
        and _gains(module.weight, _ranks_of_sizes(name, spec, layout))
    ]


def _gains(matrix: torch.Tensor, ranks: tuple[int, int]) -> bool:
    """Return True if both sizes of a part are large enough, of those that the ranks divide."""
    sizes = zip(matrix.shape, ranks, strict=True)
    return all(size >= LEAST * count and size % (MULTIPLE * count) == 0 for size, count in sizes)


def _ranks_of_sizes(name: str, spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Return among how many tensor ranks the rows, and the columns, of a matrix are divided."""
    style = spec.language.tensor_plan.get(name, "")
    rows = layout.tensor if style.startswith("colwise") else 1
    columns = layout.tensor if style.startswith("rowwise") else 1
    return rows, columns


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model without such layers or rows to share, or a GPU without it."""
    if layout.float8 == "none":
        return
    model = spec.build()
    if not (linear := layers(model, spec, layout)):
        expected = f"trained linear layers in blocks, of multiples of {MULTIPLE} from {LEAST} on"
        raise ConfigError(Problem("trainer.float8", f"{spec.name}, which has none", expected))
    for name in linear if layout.float8 == "tensorwise" else ():
        # torchao pads no shard, and ranks would gather shards of different sizes
        if (rows := len(model.get_parameter(f"{name}.weight"))) % layout.shard:
            actual = f"tensorwise, with {rows} rows of {name} on {layout.shard} ranks"
            expected = "as many rows on each rank"
            hint = 'Take "rowwise", or another mesh.shard.'
            raise ConfigError(Problem("trainer.float8", actual, expected, hint))
    gpu = torch.cuda.is_available()
    if gpu and torch.cuda.get_device_capability() < (8, 9) and torch.version.hip is None:
        raise lacking(layout, torch.cuda.get_device_name())


def lacking(layout: Layout, gpu: str) -> ConfigError:
    """Build the error of a GPU, by its name, that has no float8."""
    actual = f"{layout.float8} on {gpu}"
    return ConfigError(Problem("trainer.float8", actual, "a GPU with float8: Ada, Hopper, later"))


def apply(model: nn.Module, spec: ModelSpec, layout: Layout, device: str) -> None:
    """Have the layers multiply in float8, in place; the device "cpu" emulates it.

    Weights with one scale each ("tensorwise") are gathered in float8, too. Layers that tensor
    parallelism splits afterwards have the scales of a rank's part.
    """
    float8 = imported("torchao.float8", "trainer.float8")
    chosen = set(layers(model, spec, layout))
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(layout.float8),
        emulate=device == "cpu",
        enable_fsdp_float8_all_gather=layout.float8 == "tensorwise",
    )
    wanted = lambda module, name: name in chosen  # noqa: E731
    float8.convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def converted(layer: nn.Module) -> bool:
    """Return True for a layer that multiplies in float8."""
    return hasattr(layer, "linear_mm_config")


def product(layer: Any, given: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b in float8, by this rank's part of a converted layer's matrix."""
    # not by `imported`, which can't be compiled
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    matrix = local(layer.weight).t()
    result = matmul_with_hp_or_float8_args.apply(
        given, matrix, layer.linear_mm_config, layer.config
    )
    return result if bias is None else result + bias.to(result.dtype)


def scale(modules: Iterable[nn.Module], layout: Layout) -> None:
    """Compute the scales of all updated weights by one reduction, for their gathers. Collective."""
    if layout.float8 == "tensorwise":
        float8 = imported("torchao.float8", "trainer.float8")
        for module in modules:
            float8.precompute_float8_dynamic_scale_for_fsdp(module)
