"""The FLOPs of a training step: counted on the meta device, and by PaLM's formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from trainer.models.spec import ModelSpec


def counted_flops(spec: ModelSpec, loss: Callable[[nn.Module], torch.Tensor]) -> float:
    """Count the FLOPs of a loss's forward and backward pass by PyTorch's counter.

    Matrix products, convolutions and attention count. Both passes run on the meta device, on which
    `loss(model)` makes its input.
    """
    ours = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=ours) as counter:
        loss(spec.build().train()).backward()
    return float(counter.get_total_flops())


def _convolution_backward(
    grad: list[int], given: list[int], weight: list[int], *rest: Any, **_: object
) -> int:
    """Count the forward pass's FLOPs for each wanted gradient, of the input and of the weight.

    PyTorch's own formula ignores groups.
    """
    transposed = rest[4]
    wanted = rest[7]
    return conv_flop_count(given, weight, grad, transposed) * sum(wanted[:2])


def flops_per_token(spec: ModelSpec, sequence: int, causal: bool = True) -> float:
    """Return the training FLOPs per token, forward and backward: `6 N + 6 L H T`.

    Without `causal` the last term is `12 L H T`: that of torchtitan's MFU, which counts attention
    to later tokens, too.

    N counts the parameters in a token's matrix products: with the head, but without the input
    embedding and without the experts that the token is not routed to. A frozen parameter has no
    weight gradient and costs 4 instead of 6. L is the number of layers, H is heads x head size, and
    T is `sequence`, in tokens. Source: PaLM, arXiv 2204.02311, appendix B, with the attention term
    halved for the causal mask.
    """
    language = spec.language
    matrix = spec.parameters - language.embedding_parameters - language.idle_parameters
    learned = min(matrix, spec.parameters - sum(spec.training.frozen.values()))
    attention = 12.0 * language.layers * language.attention.width * sequence
    attention = attention / 2 if causal else attention
    return 4.0 * matrix + 2.0 * learned + attention
