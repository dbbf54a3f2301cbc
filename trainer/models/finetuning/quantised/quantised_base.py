"""A frozen base in four or eight bits (QLoRA, arXiv 2305.14314): `trainer.adapter.quantize`.

A linear layer keeps its weight as bytes (`nf4.py`, `int8.py`), one frozen parameter. To engines it
is one of any other dtype: they place, shard and gather it, and gathered bytes give the same values
under every layout. A weight is quantised whole, as it is read, before any of that, and dequantised
where it multiplies: whole, or a tensor rank's part. Routed experts are in `quantised_experts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer.distributed.dtensor import local
from trainer.errors import ConfigError, Problem
from trainer.models.finetuning.quantised.format import WHOLE, MatrixPart, WeightFormat
from trainer.models.names import aliases_of

CHUNK = 2**24
"""The values of a stack that are dequantised at once, at least those of one matrix."""


class Form(NamedTuple):
    """The shape and format of a weight, which its bytes do not say."""

    shape: tuple[int, ...]
    format: WeightFormat
    stacked: bool = False
    """True for a stack over its first dimension, whose matrices are quantised each by itself."""
    part: MatrixPart = WHOLE
    """The part of the weight that this rank multiplies by."""

    @property
    def values(self) -> int:
        """The number of values of the weight."""
        return math.prod(self.shape)

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the weight's shape on the meta device."""
        return torch.empty(self.shape, device="meta")

    def empty(self, device: torch.device) -> nn.Parameter:
        """Make the frozen parameter for the bytes of the whole, [bytes] or [matrices, bytes]."""
        stack = self.shape[:1] if self.stacked else ()
        size = self.format.size(self.shape[len(stack) :])
        data = torch.empty(*stack, size, dtype=torch.uint8, device=device)
        return nn.Parameter(data, requires_grad=False)

    def stored(self, value: torch.Tensor) -> torch.Tensor:
        """Quantise a whole weight; return its bytes, those of all parts."""
        if self.stacked:
            return torch.stack([self.format.quantise(matrix) for matrix in value])
        data = self.format.quantise(value)
        return self.divided(data) if self.part.of > 1 else data

    def divided(self, data: torch.Tensor) -> torch.Tensor:
        """Return the bytes of all parts of a matrix, one after the other; `data`: of the whole."""
        return self.format.divided(data, self.shape, self.part)

    def dequantised(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rank's part of the weight; of a stack, the matrices whose bytes are given."""
        if data.dtype != torch.uint8:  # of an engine that casts all that it gathers
            raise TypeError(f"the bytes of a quantised weight have become {data.dtype}")
        if not self.stacked:
            return self.format.dequantise(data, self.shape, dtype, self.part)
        matrix = self.shape[1:]
        stack = torch.empty(len(data), *matrix, dtype=dtype, device=data.device)
        size = max(1, CHUNK // math.prod(matrix))
        for matrices, rows in zip(stack.split(size), data.split(size), strict=True):
            matrices.copy_(self.format.dequantise(rows, matrices.shape, dtype))
        return stack


class Quantised(nn.Module):
    """A module with quantised weights."""

    forms: dict[str, Form]
    """The forms of these parameters, by their names in the module."""


class QuantisedLinear(Quantised):
    """A linear layer whose weight is frozen and quantised."""

    def __init__(self, linear: nn.Linear, format: WeightFormat) -> None:
        """Take the place of `linear`, on its device; the weight has no values yet."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.forms = {"weight": Form((self.out_features, self.in_features), format)}
        self.weight = self.form.empty(linear.weight.device)
        self.bias = linear.bias

    @property
    def form(self) -> Form:
        """The form of the weight."""
        return self.forms["weight"]

    def divide(self, part: MatrixPart) -> None:
        """Let the layer multiply by a part; its weight, of all parts, is still to be divided."""
        self.forms = {"weight": self.form._replace(part=part)}
        self.weight = nn.Parameter(self.form.divided(self.weight.data), requires_grad=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.product(given, self.bias)

    def product(self, given: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b, with this rank's part of W."""
        given = given.to(dtype_for(given))
        bias = None if bias is None else bias.to(given.dtype)
        return _Product.apply(given, local(self.weight), bias, self.form)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self.form.format.name}"


def dtype_for(given: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a layer computes with an input."""
    place = given.device.type
    if place != "meta" and torch.is_autocast_enabled(place):
        return torch.get_autocast_dtype(place)
    return given.dtype


class _Product(torch.autograd.Function):
    """x W^T + b, with W dequantised again for the gradient of x, so that no layer keeps it."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, form: Form
    ) -> torch.Tensor:
        ctx.save_for_backward(data)
        ctx.form = form
        return F.linear(given, form.dequantised(data, given.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> object:  # type: ignore[override]
        (data,) = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_given = of_bias = None
        if needs[0]:
            of_given = gradient @ ctx.form.dequantised(data, gradient.dtype)
        if needs[2]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_given, None, of_bias, None


class StoredWeight(NamedTuple):
    """A quantised weight."""

    data: nn.Parameter
    """Its bytes, or this rank's part of them."""
    form: Form


def quantise_linear(model: nn.Module, blocks: Sequence[str], format: WeightFormat) -> None:
    """Quantise the frozen linear layers of a model's blocks, in place.

    The head and what is trained stay as they are, as do layers of other classes and tied weights.
    """
    inside = tuple(f"{block}." for block in blocks)
    tied = aliases_of(model)
    for name, module in list(model.named_modules()):
        weight = f"{name}.weight"
        known = type(module) is nn.Linear and name.startswith(inside)
        if not known or weight in tied or weight in tied.values():
            continue
        assert isinstance(module, nn.Linear)
        if module.weight.requires_grad or ".original_module" in name:
            continue
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, QuantisedLinear(module, format))


def quantised_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """Return the quantised weights by their names."""
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, Quantised)]
    return {
        f"{name}.{key}": StoredWeight(module.get_parameter(key), form)
        for name, module in modules
        for key, form in module.forms.items()
    }


def note_of(base: str, model: nn.Module) -> str:
    """Say how much of a frozen base is quantised, and how much is not.

    Raises ConfigError if nothing is.
    """
    stored = quantised_weights(model)
    if not stored:
        actual = f"{base} has no frozen torch.nn.Linear and no stacked experts in its blocks"
        raise ConfigError(Problem("trainer.adapter.quantize", actual, "one at least"))
    format = next(iter(stored.values())).form.format
    named = model.named_parameters()
    rest = sum(p.numel() for name, p in named if name not in stored and not p.requires_grad)
    values = sum(weight.form.values for weight in stored.values())
    size = sum(weight.data.numel() for weight in stored.values())
    stacks = sum(weight.form.stacked for weight in stored.values())
    of_experts = f" and {stacks} stacks of experts" if stacks else ""
    return (
        f"{len(stored) - stacks} linear layers{of_experts} ({values / 1e6:,.1f} M values) are in "
        f"{format.name} ({size / 2**30:.2f} GiB); the other {rest / 1e6:,.1f} M frozen values are "
        f"not ({2 * rest / 2**30:.2f} GiB in 16 bits)"
    )


def values_of(model: nn.Module) -> dict[str, int]:
    """Return the number of values of each parameter, by name; quantised ones count whole."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    stored = quantised_weights(model).items()
    return sizes | {name: weight.form.values for name, weight in stored}
