"""Activation checkpointing: activations that are recomputed in the backward pass, not kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.distributed.dtensor import local
from trainer.layout import Recompute
from trainer.models.spec import ModelSpec
from trainer.parallel import patches
from trainer.parallel.recompute import adapter_sums, summed, tiles
from trainer.parallel.recompute.block_mode import BlockMode
from trainer.parallel.recompute.offload import on_host
from trainer.tasks.mixers import kept_apart

if TYPE_CHECKING:
    from torch._ops import OpOverload

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm")
"""Matrix products by their names in `aten`, besides all that end in `grouped_mm`."""
SMALL = ("topk", "max", "amax")
"""Results that cost a pass over a large tensor: the choice of experts, the scales of float8."""


def apply(model: nn.Module, spec: ModelSpec, recompute: Recompute, parts: int = 1) -> None:
    """Wrap the forward of each chosen block, and of MLPs in tiles (`parts`: theirs), in place.

    Random numbers are replayed: a recomputed block drops the same activations as before.
    """
    if recompute.tile:
        tiles.apply(model, spec, recompute.tile, parts)
    if recompute.mode == "selective":
        adapter_sums.apply(model)
    for index, name in enumerate(spec.blocks):
        if recompute.chooses(index):
            block = model.get_submodule(name)
            routes = spec.language.idle_parameters > 0
            biased = any(getattr(module, "has_bias", False) for module in block.modules())
            written = set[str]()
            if routes or biased:
                written |= {"topk"}
            if biased:
                written |= {"_grouped_mm"}
            kinds = spec.training.draws, written
            wrapped = partial(_recomputed, block.forward, recompute, *kinds)
            patches.replace_forward(block, wrapped)


def _recomputed(
    forward: Callable[..., object],
    recompute: Recompute,
    draws: bool,
    written: set[str],
    *args: object,
    **kwargs: Any,
) -> object:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    forward = kept_apart(forward)
    contexts: dict[str, Any] = {}
    if recompute.mode == "selective":
        # compiled code writes nothing over
        known = None if torch.compiler.is_compiling() else written
        contexts["context_fn"] = partial(_selective, recompute.every, known)
    with on_host() if recompute.mode == "offload" else nullcontext():
        return checkpoint(
            forward, *args, **contexts, **kwargs, use_reentrant=False, preserve_rng_state=draws
        )


def _selective(every: int, written: set[str] | None) -> object:
    """Return the contexts of one block's forward pass and of its recomputation.

    They keep what is costly or must not change; of matrix products, with `every` 2, only the first
    of each two, as torchtitan does. What was gathered has the size of all ranks' parts: it is
    gathered again. `written`: the operators whose results the block writes over,
    to which new ones are added.
    """
    products: Counter[bool] = Counter()
    gathered = False

    def policy(
        context: SelectiveCheckpointContext,
        operator: OpOverload,
        *_: object,
        **options: object,
    ) -> CheckpointPolicy:
        nonlocal gathered
        if is_sent(operator):
            # a collective is awaited where it is begun
            gathered = "all_gather" in operator._opname or (gathered and "wait" in operator._opname)
            if gathered:  # by its own choice the compiler would keep it
                return CheckpointPolicy.MUST_RECOMPUTE
        is_term = operator in summed.PRODUCTS and summed.COMPUTES.get()
        kept = is_kept(operator, options) and not is_term and not tiles.COMPUTES.get()
        if kept and every > 1 and is_product(operator):
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % every == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    if written is None:
        return forward, again
    copied = frozenset(written)
    copies = (_Results(copied),) if copied else ()
    # a pass that has shown another operator is recomputed as a whole
    recomputed = _Within(lambda: written == copied, summed.TermsLeftOut(), again, *copies)
    return _Within(lambda: True, forward, _Results(copied, written)), recomputed


class _Within(ExitStack):
    """Enters contexts if `applies()`, each time that it is entered itself."""

    def __init__(
        self, applies: Callable[[], bool], *contexts: AbstractContextManager[object]
    ) -> None:
        super().__init__()
        self._applies = applies
        self._contexts = contexts

    def __enter__(self) -> _Within:
        for context in self._contexts if self._applies() else ():
            self.enter_context(context)
        return self


class _Results(BlockMode):
    """Gives a model copies of what some operators return, as it writes into them, not what is kept.

    Routers divide the weights of chosen experts in place; transformers adds experts' biases so.
    PyTorch does not see it if a view was taken before. Operators whose kept results are
    written over nevertheless are added to `written`.
    """

    def __init__(self, copied: frozenset[str], written: set[str] | None = None) -> None:
        super().__init__()
        self._copied = copied
        self._written = written
        self._kept: dict[int, tuple[str, StorageWeakRef]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "_opname", "")
        if name in self._copied and is_kept(func, kwargs):
            return tree_map_only(torch.Tensor, torch.clone, result)
        if self._written is not None:
            for place, argument in _written_over(func):
                given = args[place] if place < len(args) else kwargs.get(argument)
                for tensor in _tensors(given):
                    before = self._kept.get(local(tensor).untyped_storage()._cdata)
                    if before is not None and not before[1].expired():
                        self._written.add(before[0])
            if is_kept(func, kwargs):
                refs = [StorageWeakRef(local(t).untyped_storage()) for t in _tensors(result)]
                self._kept |= {ref.cdata: (name, ref) for ref in refs}
        return result


@cache
def _written_over(operator: OpOverload) -> list[tuple[int, str]]:
    """Return the places and names of the arguments that an operator writes over.

    Collectives in place do not say which; it may be any.
    """
    schema = getattr(operator, "_schema", None)  # flex attention's operator has none
    arguments = enumerate(schema.arguments if schema else ())
    sends = operator.namespace == "c10d"
    written = [
        one for one in arguments if sends or (one[1].alias_info and one[1].alias_info.is_write)
    ]
    return [(place, argument.name) for place, argument in written]


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@cache
def is_product(operator: OpOverload) -> bool:
    """Return True for a matrix product, also that of all experts at once."""
    name = getattr(operator, "_opname", "")  # flex attention's operator has none
    return operator.namespace == "aten" and (name in PRODUCTS or name.endswith("grouped_mm"))


def is_kept(operator: OpOverload, options: Mapping[str, object]) -> bool:
    """Return True for what `selective` keeps; it recomputes all else.

    These are matrix products, attention of any library by its name, what other ranks sent, the
    choice of experts, which must be the same in the backward pass, the largest values, by which
    float8 is scaled, and what a layer with an adapter gives. `options` are the operator's keyword
    arguments.
    """
    return _is_costly(operator) or adapter_sums.is_sum(operator, options)


@cache
def _is_costly(operator: OpOverload) -> bool:
    name = getattr(operator, "_opname", str(operator))
    attention = "attention" in name or "attn" in name
    return is_product(operator) or attention or is_sent(operator) or name in SMALL


def is_sent(operator: OpOverload) -> bool:
    """Return True for an exchange between ranks, and for the wait for one.

    Those in place are none: by them DeepSpeed gathers the parameters, again for each pass.
    """
    return operator.namespace == "_c10d_functional"
