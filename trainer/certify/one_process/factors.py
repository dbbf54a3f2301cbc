"""The float8 products of one process, in the layers that the docs name; and their rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from trainer.distributed.autograd import differentiable_once
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.storage import imported

MULTIPLE = 16
"""Both dimensions of a layer are multiples of this number; a tiny copy has no least dimension."""
SHAKEN = 1e-5
"""The relative change of weights that shows how far float8 rounds: it moves one factor in some
hundreds to another float8 number, which is more than float32 arithmetic in another order does."""


class Parts(NamedTuple):
    """The tensor ranks, of which each multiplies by a part of a matrix, with scales of its own."""

    ranks: int
    plan: Mapping[str, str]
    """How layers are split, by transformers' names; others are whole."""

    def dimension(self, name: str) -> int | None:
        """Return the dimension along which a layer's matrix is split; None for a whole one."""
        kind = self.plan.get(name, "").partition("_")[0] if self.ranks > 1 else ""
        return {"colwise": 0, "rowwise": 1}.get(kind)

    def multiplies(self, name: str, matrix: torch.Tensor) -> bool:
        """Return True if both dimensions of a rank's part are multiples of MULTIPLE."""
        least = [MULTIPLE, MULTIPLE]
        dimension = self.dimension(name)
        if dimension is not None:
            least[dimension] *= self.ranks
        return all(size % of == 0 for size, of in zip(matrix.shape, least, strict=True))


class _Replacement(nn.Linear):
    """A linear layer in another's place, with its parameters; `part` multiplies by them."""

    def __init__(self, layer: nn.Linear, part: nn.Module) -> None:
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self._part = (part,)  # not a child, whose parameters would be the model's

    def _times(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product of the part's kind, without a bias."""
        product: torch.Tensor = functional_call(self._part[0], {"weight": weight}, (input,))
        return product


class InParts(_Replacement):
    """A linear layer whose product is made of those with the parts of its matrix."""

    def __init__(self, layer: nn.Linear, part: nn.Module, dimension: int, count: int) -> None:
        super().__init__(layer, part)
        self._dimension = dimension
        self._count = count

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product, [..., outputs], of `input`, [..., inputs]."""
        matrices = self.weight.chunk(self._count, self._dimension)
        rows = [input] * self._count if self._dimension == 0 else input.chunk(self._count, -1)
        results = [self._times(row, matrix) for row, matrix in zip(rows, matrices, strict=True)]
        whole = torch.cat(results, -1) if self._dimension == 0 else sum(results[1:], results[0])
        return whole if self.bias is None else whole + self.bias


class HeadInFloat8(_Replacement):
    """An output head that multiplies with the gradient of the sum of the losses.

    In 16 bits that gradient is rounded before it is cast, so it matters that it is the sum's. What
    the head passes on is the gradient of the sum times a factor, which the caller's loss is.
    """

    def __init__(self, head: nn.Linear, part: nn.Module, factor: Callable[[], float]) -> None:
        super().__init__(head, part)
        self._factor = factor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits in float32, [..., vocabulary], of hidden states [..., width]."""
        factor = self._factor()
        weight: torch.Tensor = _Times.apply(self.weight, factor)
        hidden: torch.Tensor = _Times.apply(input, factor)
        logits = self._times(hidden, weight)
        if self.bias is not None:
            logits = logits + _Times.apply(self.bias, factor)
        return _Times.apply(logits.float(), 1 / factor)  # type: ignore[no-any-return]


class _Times(torch.autograd.Function):
    """Returns a tensor as it is, and multiplies its gradient by a factor."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, given: torch.Tensor, factor: float
    ) -> torch.Tensor:
        ctx.factor = factor
        return given.view_as(given)

    @staticmethod
    @differentiable_once("a head in float8")
    def backward(ctx: Any, gradient: torch.Tensor) -> object:  # type: ignore[override]
        return gradient * ctx.factor, None


def layers_of(model: nn.Module, blocks: Sequence[str], parts: Parts) -> list[str]:
    """List the trained linear layers of the blocks that multiply in float8."""
    layers = []
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if not isinstance(module, nn.Linear) or not module.weight.requires_grad:
                continue
            if parts.multiplies(name, module.weight):
                layers.append(name)
    return layers


def multiply_in_float8(
    model: nn.Module, spec: ModelSpec, layout: Layout, factor: Callable[[], float]
) -> None:
    """Replace those layers, and the head if the layout says so, by torchao's, in place, and emulate
    float8.

    Factors have a scale for each matrix, or one for each row, as the layout says. `factor` returns
    what the sum of the losses is multiplied by. Raises ConfigError if torchao can't be imported.
    """
    float8 = imported("torchao.float8", "trainer.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(layout.float8), emulate=True)
    parts = Parts(layout.tensor, spec.language.tensor_plan)
    layers = layers_of(model, spec.blocks, parts)
    whole = {name for name in layers if parts.dimension(name) is None}
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name in whole
    )
    shell = _shell(config)
    for name in layers:
        dimension = parts.dimension(name)
        if dimension is not None:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            model.set_submodule(name, InParts(layer, shell, dimension, parts.ranks))
    if layout.float8_head:
        name, head = _head_of(model)
        model.set_submodule(name, HeadInFloat8(head, _shell(_head_config()), factor))


def _shell(config: object) -> nn.Module:
    """Return torchao's layer of a config, for products with a matrix that a caller gives it."""
    float8 = imported("torchao.float8", "trainer.float8")
    plain = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"))
    return float8.convert_to_float8_training(plain, config=config)[0]  # type: ignore[no-any-return]


def _head_of(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the name and the module of the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return next((name, head) for name, module in model.named_modules() if module is head)


def _head_config() -> object:
    """Return torchao's config of the head.

    The gradient of its matrix is not in float8. Each row of hidden states and of the logits'
    gradient has a scale, which is not rounded to a power of 2.
    """
    float8 = imported("torchao.float8", "trainer.float8")
    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    return replace(recipe, emulate=True, round_scales_to_power_of_2=False)


def lowered(model: nn.Module, dtype: torch.dtype, kind: str) -> nn.Module:
    """Copy the model with parameters in a lower precision.

    Weights with one scale each (`kind` "tensorwise") stay in float32: they are gathered in float8,
    to which they are rounded directly. The head's is gathered in the lower precision.
    """
    low = copy.deepcopy(model)
    kept = set[int]()
    if kind == "tensorwise":
        linear = imported("torchao.float8.float8_linear", "trainer.float8").Float8Linear
        scaled = [module for module in low.modules() if isinstance(module, linear)]
        casts = {id(layer.weight): layer.config.cast_config_weight for layer in scaled}
        kept = {own for own, cast in casts.items() if cast.scaling_granularity.name == "TENSORWISE"}
    for parameter in low.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    return low


def shaken(model: nn.Module, seed: int, change: float = SHAKEN) -> nn.Module:
    """Copy the model with weights that are changed at random, and so round differently.

    Relative to the weights, the changes are normal with the standard deviation `change`.
    """
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    for parameter in moved.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.data *= 1 + change * noise
    return moved
