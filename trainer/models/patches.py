"""Patches of transformers 5.0 to 5.24 and PEFT 0.17 to 0.21: symptoms, and when each can go.

`tests/models/test_patches.py` fails once one of them is no longer needed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import LoraConfig


def mark_values(tensor: torch.Tensor, *, given: bool) -> None:
    """Mark whether a tensor's values are `given` already: `_init_weights` then leaves it alone.

    Symptom: a tensor read from a file is drawn again. Can go when transformers has a public way to
    say which tensors `_init_weights` fills.
    """
    tensor._is_hf_initialized = given  # type: ignore[attr-defined]


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if `mark_values` said that the tensor's values are given."""
    return bool(getattr(tensor, "_is_hf_initialized", False))


def correct_prefix(model: PreTrainedModel) -> None:
    """Name the module that holds a model's body where its class states another name.

    Symptom: `base_model` of Llama-4's text model is the model itself. Can go when its
    `base_model_prefix` is "model".
    """
    bodies = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    if model.base_model is model and len(bodies) == 1:
        model.base_model_prefix = bodies[0]  # type: ignore[assignment]


def skip_rescaling(model: PreTrainedModel) -> None:
    """Keep RWKV from dividing its weights in place in evaluation; its saved config stays as it is.

    Symptom: after an evaluation, other weights are saved. Can go when RWKV divides activations.
    """
    if getattr(model.config, "rescale_every", 0):
        unscaled = copy.deepcopy(model.base_model.config)
        unscaled.update({"rescale_every": 0})
        model.base_model.config = unscaled


def as_class(module: nn.Module, kind: type[nn.Module], **attributes: object) -> None:
    """Make a module one of another class, with more attributes.

    Symptom: transformers computes experts with parameters of the module itself, so that no module
    around it can dequantise them. Can go when it takes them as arguments.
    """
    module.__class__ = kind
    vars(module).update(attributes)


@contextmanager
def with_tensors(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], attributes: Mapping[str, object]
) -> Iterator[None]:
    """Let a module have other tensors as its parameters, and other attributes, for a while.

    The symptom, and when it can go: as for `as_class`.
    """
    before = dict(module._parameters)
    others = {name: vars(module)[name] for name in attributes}
    for name, value in tensors.items():
        module._parameters[name] = cast(nn.Parameter, value)
    vars(module).update(attributes)
    try:
        yield
    finally:
        module._parameters.update(before)
        vars(module).update(others)


def saved_adapter_config(config: LoraConfig) -> LoraConfig:
    """Return a PEFT config as it is saved: for inference, with its targets in order.

    Symptom: PEFT makes a set of them, so that each process saves another order. Can go when
    `save_pretrained` sorts them.
    """
    saved = replace(config, inference_mode=True)
    saved.target_modules = sorted(config.target_modules or ())
    if config.target_parameters:
        saved.target_parameters = sorted(config.target_parameters)
    return saved
