"""The float8 products of one process, in the layers that the docs name; and their rounding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from trainer.storage import imported

MULTIPLE = 16
"""Both dimensions of a layer are multiples of this number; a tiny copy has no least dimension."""
SHAKEN = 1e-5
"""The relative change of weights that shows how far float8 rounds: it moves one factor in some
hundreds to another float8 number, which is more than float32 arithmetic in another order does."""


def layers_of(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """List the trained linear layers of the blocks whose dimensions are multiples of MULTIPLE."""
    layers = []
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if isinstance(module, nn.Linear) and module.weight.requires_grad:
                rows, columns = module.weight.shape
                if rows % MULTIPLE == 0 and columns % MULTIPLE == 0:
                    layers.append(name)
    return layers


def multiply_in_float8(model: nn.Module, blocks: Sequence[str], kind: str) -> None:
    """Replace those layers by torchao's, in place, and emulate float8.

    `kind` is "tensorwise", a scale for each matrix, or "rowwise", one for each row. Raises
    ConfigError if torchao can't be imported.
    """
    float8 = imported("torchao.float8", "trainer.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(kind), emulate=True)
    layers = set(layers_of(model, blocks))
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name in layers
    )


def lowered(model: nn.Module, dtype: torch.dtype, kind: str) -> nn.Module:
    """Copy the model with parameters in a lower precision.

    Weights with one scale each (`kind` "tensorwise") stay in float32: they are gathered in float8,
    to which they are rounded directly.
    """
    low = copy.deepcopy(model)
    kept = set[int]()
    if kind == "tensorwise":
        linear = imported("torchao.float8.float8_linear", "trainer.float8").Float8Linear
        kept = {id(module.weight) for module in low.modules() if isinstance(module, linear)}
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
