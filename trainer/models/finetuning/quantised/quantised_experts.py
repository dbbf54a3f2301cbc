"""Routed experts whose stacks are made where they multiply: dequantised, or with an adapter.

transformers stacks the matrices of a layer's experts in one parameter [experts, ...]. Quantised,
it has a row of bytes for each expert, whose matrix is quantised by itself: ranks can divide it by
experts, as they divide the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.distributed.dtensor import local
from trainer.models.finetuning.quantised.format import WeightFormat
from trainer.models.finetuning.quantised.quantised_base import (
    Form,
    Quantised,
    dtype_for,
    quantise_linear,
)
from trainer.models.names import expert_stacks
from trainer.models.patches import as_class, with_tensors

_COUNTS = ("num_experts", "_is_expert_parallel")
"""The attributes that say of which experts a rank has the parameters."""


def quantised(model: nn.Module, blocks: Sequence[str], format: WeightFormat) -> nn.Module:
    """Quantise the frozen linear layers and experts of a model's blocks in place; return it."""
    quantise_linear(model, blocks, format)
    for name in expert_stacks(model, blocks):
        quantise_stacks(model.get_submodule(name), format)
    return model


class StackAddition(Protocol):
    """An adapter on a stack."""

    def added_to(self, stack: torch.Tensor, first: int) -> torch.Tensor:
        """Return the stack with the adapter's product, in the stack's dtype.

        `first`: the number of its first expert in the whole layer.
        """


class MadeExperts(Quantised):
    """A module of experts with stacks that are quantised or adapted."""

    adapters: dict[str, StackAddition]
    """The adapters on these parameters, by their names in the module."""
    first_expert: int = 0
    """The number of the first expert whose parameters this rank has."""


def quantise_stacks(experts: nn.Module, format: WeightFormat) -> None:
    """Quantise the frozen stacks of a module of experts, in place."""
    frozen = {
        key: Form(tuple(stack.shape), format, stacked=True)
        for key, stack in experts.named_parameters(recurse=False)
        if stack.ndim == 3 and not stack.requires_grad
    }
    if not frozen:
        return
    for key, form in frozen.items():
        experts.register_parameter(key, form.empty(experts.get_parameter(key).device))
    _made(experts).forms.update(frozen)


def adapt_stacks(experts: nn.Module, adapters: Mapping[str, StackAddition]) -> None:
    """Let a module of experts multiply by stacks with these adapters' products, in place."""
    _made(experts).adapters.update(adapters)


def _made(experts: nn.Module) -> MadeExperts:
    """Return a module of experts as one that makes its stacks; none of them, at first."""
    if not isinstance(experts, MadeExperts):
        kind = _kind(type(experts))  # type: ignore[arg-type]  # a class can be hashed
        as_class(experts, kind, forms={}, adapters={})
    assert isinstance(experts, MadeExperts)
    return experts


@cache
def _kind(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of experts that make their stacks and compute as `kind` does."""

    @wraps(kind.forward)
    def forward(self: MadeExperts, *args: object, **kwargs: object) -> object:
        return _computed(self, kind.forward, args, kwargs)

    return type(f"Made{kind.__name__}", (MadeExperts, kind), {"forward": forward})


def _computed(
    experts: MadeExperts,
    plain: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, object],
) -> object:
    """Compute with made stacks, which are made again, and all computed again, for the backward
    pass: no layer keeps them.

    What the module has now is what it has then, though engines may have taken it out since.
    """
    hidden = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(hidden, torch.Tensor)
    dtype = dtype_for(hidden)
    tensors = dict(experts.named_parameters(recurse=False))
    counts = {name: vars(experts)[name] for name in _COUNTS if name in vars(experts)}

    def run(*args: object) -> object:
        made = {key: form.dequantised(tensors[key], dtype) for key, form in experts.forms.items()}
        for key, adapter in experts.adapters.items():
            stack = local(made.get(key, tensors[key])).to(dtype)
            made[key] = adapter.added_to(stack, experts.first_expert)
        with with_tensors(experts, {**tensors, **made}, counts):
            return plain(experts, *args, **kwargs)

    if not torch.is_grad_enabled():
        return run(*args)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
