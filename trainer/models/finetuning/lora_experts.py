"""Adapters on routed experts: on the stacks of their matrices, as PEFT's `target_parameters`.

PEFT wraps a module of experts once for each adapted stack. These wrappers give the names in files,
which inference engines read, too. Here the module of experts adds the products itself, for its own
stacks alone, and keeps none of the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainer.distributed.dtensor import local
from trainer.models.finetuning.lora_weights import ADAPTER, factors
from trainer.models.finetuning.quantised.quantised_experts import adapt_stacks
from trainer.models.names import expert_stacks
from trainer.models.patches import as_class
from trainer.models.spec import ModelSpec

if TYPE_CHECKING:
    from peft.tuners.lora.layer import ParamWrapper


def stacks_of(model: nn.Module, spec: ModelSpec) -> list[str]:
    """List the stacks [experts, ...] of matrices in a model's blocks that can have an adapter."""
    return [
        f"{name}.{key}"
        for name in expert_stacks(model, spec.blocks)
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def stacks_among(model: nn.Module, targets: Iterable[str]) -> list[str]:
    """Return those of an adapter's targets that are stacks: parameters, not linear layers."""
    modules = dict(model.named_modules())
    return [name for name in targets if name not in modules]


class StackAdapter(NamedTuple):
    """The adapter in one of PEFT's wrappers."""

    wrapper: Any

    def added_to(self, stack: torch.Tensor, first: int) -> torch.Tensor:
        """Return the stack with the adapter's product, in the stack's dtype.

        `first`: the number of its first expert in the whole layer.
        """
        if self.wrapper.disable_adapters:
            return stack
        matrices = (self.wrapper.lora_A, self.wrapper.lora_B)
        a, b = (local(matrix[ADAPTER].weight).to(stack.dtype) for matrix in matrices)
        left, right = factors(self.wrapper, a, b, slice(first, first + len(stack)))
        return torch.baddbmm(stack, left, right, alpha=self.wrapper.scaling[ADAPTER])


def computed_by_experts(model: nn.Module) -> None:
    """Let the modules of experts in PEFT's wrappers add the adapters, in place."""
    for outer in list(_outermost_wrappers(model)):
        experts = outer.get_base_layer()
        layer: nn.Module = outer
        while layer is not experts:
            assert isinstance(layer, _wrapper())
            adapt_stacks(experts, {layer.parameter_name: StackAdapter(layer)})
            as_class(layer, _passing())
            layer = layer.base_layer


def _outermost_wrappers(model: nn.Module) -> Iterator[ParamWrapper]:
    for name, module in model.named_modules():
        if isinstance(module, _wrapper()) and not name.endswith(".base_layer"):
            yield module


@cache
def _wrapper() -> type[ParamWrapper]:
    from peft.tuners.lora.layer import ParamWrapper

    return ParamWrapper


@cache
def _passing() -> type[nn.Module]:
    """Return the class of PEFT's wrapper that leaves the adapter to the module in it."""

    class Passing(_wrapper()):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            return self.base_layer(*args, **kwargs)

    return Passing
