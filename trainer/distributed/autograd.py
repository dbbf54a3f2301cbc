"""In which pass code runs, and rules for functions whose backward pass is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from trainer.errors import ConfigError, Problem

Backward = Callable[..., object]


def in_backward() -> bool:
    """Return True within a backward pass, where a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def differentiable_once(part: str) -> Callable[[Backward], Backward]:
    """Refuse a second derivative of a function whose backward pass autograd can't follow.

    It decorates `backward`. PyTorch's `once_differentiable` returns a second derivative of zero
    where only saved tensors would give one: it sees the gradients alone. `part` is what the
    function computes, for the error.

    The decorated function raises ConfigError under `create_graph=True`.
    """

    def decorated(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: object, *gradients: object) -> object:
            # a compiled block refuses by itself
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                actual = f"the gradient of {part} was to be differentiated again"
                expected = "one backward pass: a second derivative would lack terms"
                hint = (
                    "Leave out create_graph=True, or write the loss in plain PyTorch and "
                    "take a layout without tensor, context and expert ranks."
                )
                raise ConfigError(Problem("create_graph", actual, expected, hint))
            return backward(ctx, *gradients)

        return once

    return decorated
