"""Activation checkpointing: activations that are recomputed in the backward pass, not kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.layout import Recompute
from trainer.models.spec import ModelSpec
from trainer.parallel import patches
from trainer.parallel.recompute import tiles
from trainer.parallel.recompute.offload import on_host

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm")
"""Matrix products by their names in `aten`, besides all that end in `grouped_mm`."""


def apply(model: nn.Module, spec: ModelSpec, recompute: Recompute, parts: int = 1) -> None:
    """Wrap the forward of each chosen block, and of MLPs in tiles (`parts`: theirs), in place.

    Random numbers are replayed: a recomputed block drops the same activations as before.
    """
    if recompute.tile:
        tiles.apply(model, spec, recompute.tile, parts)
    if recompute.mode == "none":
        return
    for index, name in enumerate(spec.blocks):
        if recompute.mode != "every" or index % recompute.every == 0:
            block = model.get_submodule(name)
            routes = spec.language.idle_parameters > 0
            biased = any(getattr(module, "has_bias", False) for module in block.modules())
            copied = ("topk", "grouped_mm") if biased else ("topk",) if routes else ()
            kinds = spec.training.draws, copied
            wrapped = partial(_recomputed, block.forward, recompute, *kinds)
            patches.replace_forward(block, wrapped)


def _recomputed(
    forward: Callable[..., Any],
    recompute: Recompute,
    draws: bool,
    copied: tuple[str, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts: dict[str, Any] = {}
    if recompute.mode == "selective":
        copied = () if torch.compiler.is_compiling() else copied  # it writes nothing over
        contexts["context_fn"] = partial(_selective, recompute.every, copied)
    with on_host() if recompute.mode == "offload" else nullcontext():
        return checkpoint(
            forward, *args, **contexts, **kwargs, use_reentrant=False, preserve_rng_state=draws
        )


def _selective(every: int, copied: tuple[str, ...]) -> Any:
    """Return the contexts of one block's forward pass and of its recomputation.

    They keep what is costly or must not change; of matrix products, with `every` 2, only the first
    of each two, as torchtitan does.
    """
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = is_kept(operator) and not tiles.COMPUTES.get()
        if kept and every > 1 and is_product(operator):
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % every == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = create_selective_checkpoint_contexts(policy)
    return tuple(_copying(kept, copied) for kept in contexts) if copied else contexts


@contextmanager
def _copying(kept: Any, operators: tuple[str, ...]) -> Iterator[None]:
    with kept, _Copies(operators):
        yield


class _Copies(TorchDispatchMode):
    """Gives a model copies of what some operators return, as it writes into them, not what is kept.

    Routers divide the weights of chosen experts in place; transformers adds experts' biases so.
    """

    def __init__(self, operators: tuple[str, ...]) -> None:
        super().__init__()
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not getattr(func, "_opname", "").endswith(self._operators):
            return found
        return tree_map(torch.clone, found)


def is_product(operator: Any) -> bool:
    """Return True for a matrix product, also that of all experts at once."""
    name = getattr(operator, "_opname", "")  # flex attention's operator has none
    return operator.namespace == "aten" and (name in PRODUCTS or name.endswith("grouped_mm"))


def is_kept(operator: Any) -> bool:
    """Return True for what `selective` keeps; it recomputes all else.

    These are matrix products, attention of any library by its name, what other ranks sent, and the
    choice of experts, which must be the same in the backward pass. Collectives in place are not
    kept: by them DeepSpeed gathers the parameters, again for each pass.
    """
    name = getattr(operator, "_opname", str(operator))
    attention = "attention" in name or "attn" in name
    sent = operator.namespace == "_c10d_functional"
    return is_product(operator) or attention or sent or name == "topk"
