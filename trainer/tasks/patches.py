"""Patches of transformers 5: each says the symptom without it, and when it can go.

`tests/tasks/test_patches.py` fails once one of them is no longer needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.distributed.context_ranks import ATTRIBUTE, ContextRanks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def replace_loss(model: nn.Module, mean: Callable[..., object]) -> None:
    """Let `mean(logits, labels, ...)` compute the loss in the model's own `forward(labels=...)`.

    Symptom: transformers finds the loss by the name of the model's class, shifts the labels and
    takes a mean over [tokens, vocabulary] in float32. Can go when a model takes a loss function as
    an argument.
    """
    model.loss_function = mean  # type: ignore[assignment]


def register_attention(attend: Callable[..., object]) -> None:
    """Let `attend` compute what transformers calls "sdpa", in all models of this process.

    Symptom: SDPA takes a mask with an entry for each pair of tokens, and knows no rank that shares
    a sequence. Can go when a model takes its attention function as an argument. A second call
    changes nothing.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def attend_in_place_of_eager(model: nn.Module) -> None:
    """Have a model that has only its own eager attention use what is registered as "sdpa".

    Symptom: GPT-OSS writes scores of sequence x sequence for each head, since SDPA has no sinks.
    Can go when transformers gives sinks to a kernel that trains.
    """
    copies: dict[int, Any] = {}
    # other models may be built from this one
    config: PreTrainedConfig = copy.deepcopy(model.config, copies)
    config._attn_implementation = "sdpa"
    for module in model.modules():
        if (own := copies.get(id(getattr(module, "config", None)))) is not None:
            module.config = own


def has_eager_alone(model: nn.Module) -> bool:
    """Return True for a model that runs its own eager attention and has no other."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) == "eager" and lacks_sdpa(model)


def lacks_sdpa(model: nn.Module) -> bool:
    """Return True for a model of a class that transformers runs by no SDPA."""
    return not getattr(type(model), "_supports_sdpa", True)


def replace_mixer(module: nn.Module, forward: Callable[..., object]) -> None:
    """Replace the forward of a layer with state along the sequence.

    Symptom: the state of one packed document continues into the next. Without kernels on a GPU,
    transformers 5.24 raises for cu_seqlens, or ignores them. Can go when every family takes them
    on every device.
    """
    module.forward = forward  # type: ignore[method-assign,assignment]


MakeMask = Callable[..., torch.Tensor | None]
"""A function of transformers that makes a mask from keyword arguments."""
GROWING = {"dynamic", "longrope"}
"""Kinds of rotary embeddings that depend on the length of the row."""


def divide_rows(model: nn.Module, ranks: ContextRanks) -> None:
    """Let attention, dropout and rotary embeddings know the ranks that share rows with this one.

    Symptom: attention sees a part of each row, dropout draws for a part, and embeddings that grow
    with a row grow with its part. Can go when transformers divides rows for every kernel.
    """
    for module in model.modules():
        vars(module)[ATTRIBUTE] = ranks
        if isinstance(module, nn.Dropout):
            replaced = partial(ranks.dropped, module, module.forward)
            module.forward = replaced  # type: ignore[method-assign,assignment]
        kinds = getattr(module, "rope_type", "")
        if ({*kinds.values()} if isinstance(kinds, dict) else {kinds}) & GROWING:
            module.forward = partial(ranks.rotated, module.forward)  # type: ignore[method-assign]


@contextmanager
def masks_made_by(
    wrapped: Callable[[MakeMask], Callable[..., object]], is_packed: Callable[..., bool]
) -> Iterator[None]:
    """Let `wrapped(make)` make the masks in place of each `make` of transformers, and `is_packed`
    say for flash attention that a row has several documents.

    Symptom: each forward pass waits for the device to see if position ids restart within a row,
    and makes all masks again. Can go when a model takes a function that makes its masks.
    """
    from transformers import masking_utils, modeling_flash_attention_utils

    makers = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    # by hand: mock.patch takes 50 microseconds of each forward pass
    ours: list[tuple[dict[str, object], str, object]] = [
        (makers, "sdpa", wrapped(makers["sdpa"])),
        (makers, "eager", wrapped(makers["eager"])),
        (vars(masking_utils), "find_packed_sequence_indices", lambda position_ids: None),
        (vars(modeling_flash_attention_utils), "_is_packed_sequence", is_packed),
    ]
    theirs = [(place, name, place[name]) for place, name, _ in ours]
    for place, name, value in ours:
        place[name] = value
    try:
        yield
    finally:
        for place, name, value in theirs:
            place[name] = value
