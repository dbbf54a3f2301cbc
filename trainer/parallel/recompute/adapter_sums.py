"""Linear layers with an adapter: `selective` keeps the output, and not the two terms of it.

W x and s B A x have the layer's whole width, and the backward pass needs neither. PEFT's layers
would have both kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.models.finetuning.lora_opening import adapted_layers
from trainer.models.finetuning.lora_weights import ADAPTER
from trainer.parallel.patches import replace_forward
from trainer.parallel.recompute.summed import only_summed

if TYPE_CHECKING:
    from torch._ops import OpOverload


def apply(model: nn.Module) -> None:
    """Replace the forward of linear layers with a plain adapter, in place."""
    for layer in adapted_layers(model):
        replace_forward(layer, partial(_with_adapter, layer, layer.forward))


def _with_adapter(
    layer: Any, forward: Callable[..., torch.Tensor], given: torch.Tensor
) -> torch.Tensor:
    """Return W x + s B A x. A layer whose adapter is off or merged computes by its `forward`."""
    if layer.disable_adapters or layer.merged:
        return forward(given)
    with only_summed():
        of_base = layer.base_layer(given)
    first = layer.lora_A[ADAPTER]
    inner = first(layer.lora_dropout[ADAPTER](given.to(first.weight.dtype)))
    with only_summed():
        added = layer.lora_B[ADAPTER](inner)
    return torch.add(of_base, added, alpha=float(layer.scaling[ADAPTER])).to(of_base.dtype)


def is_sum(operator: OpOverload, options: Mapping[str, object]) -> bool:
    """Return True for what a layer with an adapter gives: its sum alone has a factor.

    A factor that is a float is among the options even if it is 1.
    """
    return operator is torch.ops.aten.add.Tensor and "alpha" in options
