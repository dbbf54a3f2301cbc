"""float8 matrix products by torchao, in the large linear layers of blocks (`trainer.float8`) and in
the head (`trainer.float8_head`).

The head multiplies chunk by chunk, so its scales are such that no number depends on where chunks
end: a token's hidden state has one, and so has the gradient of its logits. The gradient of the
head's matrix is a product over tokens, whose scales would be those of a chunk: it stays in the
run's precision. torchao calls this recipe `rowwise_with_gw_hp`. Its scales are powers of 2; here
they are not rounded, so that in float32 a gradient is rounded alike, whatever factor the loss has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from trainer.distributed.dtensor import local
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.storage import imported, installed
from trainer.tasks.losses.chunks import CastMatrix, Compilable, Compiler

LEAST = 1024
"""The least width of a layer: for smaller ones casts may take longer than float8 saves."""
MULTIPLE = 16
"""The kernels take multiples of it."""
HEAD_RECIPE = "rowwise_with_gw_hp"
"""torchao's name of the recipe by which a head multiplies, whatever the layers' is."""


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
    if layout.tensor > 1 and layout.float8_head:
        split = "tensor parallelism splits the vocabulary"
        return f"trainer.float8_head is for a whole head, and {split}. Set it to false."
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
    if layout.float8_head:
        _check_head(model, spec)
    gpu = torch.cuda.is_available()
    if gpu and torch.cuda.get_device_capability() < (8, 9) and torch.version.hip is None:
        raise lacking(layout, torch.cuda.get_device_name())


def _check_head(model: nn.Module, spec: ModelSpec) -> None:
    """Raise ConfigError for a head that does not return the logits, or of other sizes."""
    place = "trainer.float8_head"
    hint = "Set it to false."
    if not spec.language.head.plain:
        actual = f"{spec.name}, whose logits are more than its head's product"
        raise ConfigError(Problem(place, actual, "logits as the head returns them", hint))
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    if any(size % MULTIPLE for size in head.weight.shape):
        vocabulary, width = head.weight.shape
        actual = f"a vocabulary of {vocabulary:,} and a width of {width:,} in {spec.name}"
        raise ConfigError(Problem(place, actual, f"multiples of {MULTIPLE}", hint))


def lacking(layout: Layout, gpu: str) -> ConfigError:
    """Build the error of a GPU, by its name, that has no float8."""
    actual = f"{layout.float8} on {gpu}"
    return ConfigError(Problem("trainer.float8", actual, "a GPU with float8: Ada, Hopper, later"))


def apply(model: nn.Module, spec: ModelSpec, layout: Layout, device: str) -> None:
    """Have the layers, and the head if it is to, multiply in float8, in place.

    The device "cpu" emulates it.

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
    if layout.float8_head:
        cast = head_cast(emulate=device == "cpu")
        for module in model.modules():
            if (multiply_by := getattr(module, "multiply_by", None)) is not None:
                multiply_by(cast)


@dataclass(frozen=True)
class HeadCast:
    """Casts a head's matrix to float8, and multiplies chunks by it."""

    by_row: Compilable
    """Returns W^T of W [v, h], with a scale for each row of W."""
    as_one: Compilable
    """Returns W with one scale, its columns contiguous, as the kernels take it."""
    logits: Compilable
    """Returns x W^T of hidden states [n, h] and of what `by_row` returns."""
    hidden_gradient: Compilable
    """Returns g W of the logits' gradient [n, v] and of what `as_one` returns."""

    def __call__(self, weight: torch.Tensor) -> CastMatrix:
        return Float8Matrix(weight, self)

    def compiled(self, by: Compiler) -> HeadCast:
        casts = by(self.by_row), by(self.as_one)
        products = by(self.logits, of_tokens=1), by(self.hidden_gradient, of_tokens=1)
        return HeadCast(*casts, *products)


class Float8Matrix:
    """A head's matrix [v, h], cast when a product first needs it."""

    def __init__(self, weight: torch.Tensor, cast: HeadCast) -> None:
        self._weight = weight
        self._cast = cast

    @cached_property
    def _by_row(self) -> torch.Tensor:
        return self._cast.by_row(self._weight)

    @cached_property
    def _as_one(self) -> torch.Tensor:
        return self._cast.as_one(self._weight)

    def logits(self, part: torch.Tensor) -> torch.Tensor:
        return self._cast.logits(part, self._by_row)

    def hidden_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        return self._cast.hidden_gradient(grad, self._as_one)


def head_cast(emulate: bool) -> HeadCast:
    """Build what casts a head's matrix; `emulate`: for a device without float8."""
    config = imported("torchao.float8.config", "trainer.float8_head")
    scaling = imported("torchao.float8.float8_scaling_utils", "trainer.float8_head")
    tensors = imported("torchao.float8.float8_training_tensor", "trainer.float8_head")
    role = tensors.GemmInputRole
    recipe = config.Float8LinearConfig.from_recipe_name(HEAD_RECIPE)
    products = (recipe.gemm_config_output, recipe.gemm_config_grad_input)
    fast = [product.use_fast_accum for product in products]
    mm = tensors.ScaledMMConfig
    how = tensors.LinearMMConfig(*(mm(emulate, each) for each in (*fast, fast[1])))
    cast = partial(
        scaling.hp_tensor_to_float8_dynamic,
        float8_dtype=recipe.cast_config_weight.target_dtype,
        linear_mm_config=how,
    )
    by_rows = {"scaling_granularity": config.ScalingGranularity.AXISWISE}

    def by_row(weight: torch.Tensor) -> torch.Tensor:
        return cast(weight.t(), gemm_input_role=role.WEIGHT, axiswise_dim=0, **by_rows)

    def as_one(weight: torch.Tensor) -> torch.Tensor:
        return cast(weight.t().contiguous(), gemm_input_role=role.WEIGHT).t()

    def logits(part: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        rows = cast(part, gemm_input_role=role.INPUT, axiswise_dim=-1, **by_rows)
        return torch.mm(rows, matrix)

    def hidden_gradient(grad: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        rows = cast(grad, gemm_input_role=role.GRAD_OUTPUT, axiswise_dim=-1, **by_rows)
        return torch.mm(rows, matrix)

    return HeadCast(by_row, as_one, logits, hidden_gradient)


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
