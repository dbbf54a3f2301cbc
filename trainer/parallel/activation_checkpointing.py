"""Activation checkpointing: the choice of activations that are kept, and of those recomputed in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.layout import Recompute
from trainer.models.spec import ModelSpec

# The operators that cost most to recompute: matrix products and attention. All others are
# recomputed.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def apply(model: nn.Module, spec: ModelSpec, recompute: Recompute) -> None:
    """Wrap the forward of each chosen block, in place; no module changes its name.

    Random numbers are replayed: a recomputed block drops the same activations as before.
    """
    if recompute.mode == "none":
        return
    for index, name in enumerate(spec.blocks):
        if recompute.mode != "every" or index % recompute.every == 0:
            block = model.get_submodule(name)
            block.forward = partial(_recomputed, block.forward, recompute.mode == "selective")  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], selective: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    )
    return checkpoint(
        forward, *args, **contexts, **kwargs, use_reentrant=False, preserve_rng_state=True
    )


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
