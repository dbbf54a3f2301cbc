"""A frozen base in four bits (QLoRA, arXiv 2305.14314): `trainer.adapter.quantize`.

A linear layer keeps its weight as bytes (`nf4.py`), one frozen parameter. To engines it is one of
any other dtype: they place, shard and gather it. A weight is quantised whole, as it is read, before
any of that, and dequantised where it multiplies: whole, or a tensor rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer.distributed.dtensor import local
from trainer.errors import ConfigError, Problem
from trainer.models.finetuning import nf4
from trainer.models.names import aliases_of


class FourBitLinear(nn.Module):
    """A linear layer whose weight is frozen, in NF4."""

    def __init__(self, linear: nn.Linear, double: bool) -> None:
        """Take the place of `linear`, on its device; the weight has no values yet."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.double_quant = double
        size = sum(nf4.sizes(self.values, double))
        data = torch.empty(size, dtype=torch.uint8, device=linear.weight.device)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.bias = linear.bias
        self.part = nf4.WHOLE
        """The part of the weight that this rank multiplies by."""

    @property
    def values(self) -> int:
        """The number of values of the weight."""
        return self.in_features * self.out_features

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's shape: outputs, inputs."""
        return self.out_features, self.in_features

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the weight's shape on the meta device."""
        return torch.empty(self.shape, device="meta")

    def stored(self, value: torch.Tensor) -> torch.Tensor:
        """Quantise a whole weight [outputs, inputs]; return its bytes, those of all parts."""
        data = nf4.quantise(value, self.double_quant)
        return self._divided(data) if self.part.of > 1 else data

    def divide(self, part: nf4.MatrixPart) -> None:
        """Let the layer multiply by a part; its weight, of all parts, is still to be divided."""
        self.part = part
        self.weight = nn.Parameter(self._divided(self.weight.data), requires_grad=False)

    def _divided(self, data: torch.Tensor) -> torch.Tensor:
        return nf4.divided(data, self.shape, self.double_quant, self.part.dim, self.part.of)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.product(given, self.bias)

    def product(self, given: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b, with this rank's part of W."""
        weight = local(self.weight)
        if weight.dtype != torch.uint8:  # of an engine that casts all that it gathers
            raise TypeError(f"a weight in four bits has become {weight.dtype}")
        place = given.device.type
        if place != "meta" and torch.is_autocast_enabled(place):
            given = given.to(torch.get_autocast_dtype(place))
        bias = None if bias is None else bias.to(given.dtype)
        form = _Form(self.shape, self.double_quant, self.part)
        return _Product.apply(given, weight, bias, form)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        kind = "nf4, scales in 8 bits" if self.double_quant else "nf4"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


class _Form(NamedTuple):
    """All that the bytes of a weight do not say."""

    shape: tuple[int, int]
    double: bool
    part: nf4.MatrixPart

    def weight(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return nf4.dequantise(data, self.shape, self.double, dtype, self.part)


class _Product(torch.autograd.Function):
    """x W^T + b, with W dequantised again for the gradient of x, so that no layer keeps it."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, form: _Form
    ) -> torch.Tensor:
        ctx.save_for_backward(data)
        ctx.form = form
        return F.linear(given, form.weight(data, given.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> object:  # type: ignore[override]
        (data,) = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_given = of_bias = None
        if needs[0]:
            of_given = gradient @ ctx.form.weight(data, gradient.dtype)
        if needs[2]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_given, None, of_bias, None


def in_four_bits(model: nn.Module, blocks: Sequence[str], double: bool) -> nn.Module:
    """Put the frozen linear layers of a model's blocks into four bits, in place, and return it.

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
        setattr(model.get_submodule(parent), key, FourBitLinear(module, double))
    return model


def weights_in_four_bits(model: nn.Module) -> dict[str, FourBitLinear]:
    """Return the layers in four bits by the names of their weights."""
    modules = model.named_modules()
    return {f"{name}.weight": m for name, m in modules if isinstance(m, FourBitLinear)}


def note_of(base: str, model: nn.Module) -> str:
    """Say how much of a frozen base is in four bits, and how much is not.

    Raises ConfigError if nothing is.
    """
    layers = weights_in_four_bits(model)
    if not layers:
        actual = f"{base} has no frozen layer in its blocks that is a torch.nn.Linear"
        raise ConfigError(Problem("trainer.adapter.quantize", actual, "one at least"))
    named = model.named_parameters()
    rest = sum(p.numel() for name, p in named if name not in layers and not p.requires_grad)
    values = sum(layer.values for layer in layers.values())
    size = sum(layer.weight.numel() for layer in layers.values())
    return (
        f"{len(layers)} linear layers ({values / 1e6:,.1f} M values) are in four bits "
        f"({size / 2**30:.2f} GiB); the other {rest / 1e6:,.1f} M frozen values are not "
        f"({2 * rest / 2**30:.2f} GiB in 16 bits)"
    )


def values_of(model: nn.Module) -> dict[str, int]:
    """Return the number of values of each parameter, by name; those in four bits count whole."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sizes | {name: layer.values for name, layer in weights_in_four_bits(model).items()}
