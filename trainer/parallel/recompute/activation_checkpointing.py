"""Activation checkpointing: activations that are recomputed in the backward pass, not kept."""

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
from trainer.parallel import patches

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""The costly operators, matrix products and attention; `selective` recomputes all others."""


def apply(model: nn.Module, spec: ModelSpec, recompute: Recompute) -> None:
    """Wrap the forward of each chosen block, in place.

    Random numbers are replayed: a recomputed block drops the same activations as before.
    """
    if recompute.mode == "none":
        return
    for index, name in enumerate(spec.blocks):
        if recompute.mode != "every" or index % recompute.every == 0:
            block = model.get_submodule(name)
            selective = recompute.mode == "selective"
            patches.replace_forward(block, partial(_recomputed, block.forward, selective))


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
