"""float8 matrix products by torchao (`trainer.float8`), in the large linear layers of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

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
    if layout.tensor > 1 or layout.zero_stage == 0 or layout.offloads:
        weights = "weights that ZeRO shards and keeps on the device, without tensor parallelism"
        return f"trainer.float8 is for {weights}."
    return None


def layers(model: nn.Module, spec: ModelSpec) -> list[str]:
    """List the linear layers of blocks that are trained and of sizes that gain by float8."""
    blocks = tuple(f"{name}." for name in spec.blocks)
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name.startswith(blocks)
        and module.weight.requires_grad
        and all(size >= LEAST and size % MULTIPLE == 0 for size in module.weight.shape)
    ]


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model without such layers or rows to share, or a GPU without it."""
    if layout.float8 == "none":
        return
    model = spec.build()
    if not (linear := layers(model, spec)):
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


def apply(model: nn.Module, spec: ModelSpec, layout: Layout, device: torch.device) -> None:
    """Have the layers multiply in float8, in place; a CPU emulates it in the run's precision.

    Weights with one scale each ("tensorwise") are gathered in float8, too.
    """
    if layout.float8 == "none":
        return
    float8 = imported("torchao.float8", "trainer.float8")
    chosen = set(layers(model, spec))
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(layout.float8),
        emulate=device.type == "cpu",
        enable_fsdp_float8_all_gather=layout.float8 == "tensorwise",
    )
    wanted = lambda module, name: name in chosen  # noqa: E731
    float8.convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def scale(modules: Iterable[nn.Module], layout: Layout) -> None:
    """Compute the scales of all updated weights by one reduction, for their gathers. Collective."""
    if layout.float8 == "tensorwise":
        float8 = imported("torchao.float8", "trainer.float8")
        for module in modules:
            float8.precompute_float8_dynamic_scale_for_fsdp(module)
