"""Properties of a language model's input embedding and head, found by running them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from trainer.errors import Raised, attempt


@cache
def _body_output() -> type[ModelOutput]:
    """Return the class of a body's output, which registers itself with torch when it is made."""

    @dataclass
    class BodyOutput(ModelOutput):
        """The output of a model below its head, with every field that the families use."""

        last_hidden_state: torch.Tensor | None = None
        past_key_values: object = None
        hidden_states: object = None
        attentions: object = None
        cross_attentions: object = None
        router_logits: object = None

    return BodyOutput


class _Body(nn.Module):
    """A stand-in for everything below the head: returns `hidden`, and has the body's attributes."""

    def __init__(self, body: nn.Module, hidden: torch.Tensor) -> None:
        super().__init__()
        self._body = (body,)  # in a tuple, it is no submodule
        self._hidden = hidden

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        return _body_output()(last_hidden_state=self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"][0], name)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return True if the logits are the head's product with the last hidden state, untouched.

    Runs the model's own forward on the meta device with a stand-in for everything below the head,
    and checks that the head sees that very storage and that its output is returned as the logits.
    This detects soft caps, logit scales and upcasts.
    """
    run = _run_head(model)
    if run is None:
        return False
    same = run.given.untyped_storage()._cdata == run.hidden.untyped_storage()._cdata
    return same and run.is_last


def ends_in_head(model: PreTrainedModel) -> bool:
    """Return True if the logits are the head's output, whatever is between the body and the head.

    Models of masked tokens have a layer there.
    """
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    run = _run_head(model, width)
    return run is not None and run.is_last


class _HeadRun(NamedTuple):
    """The tensors around a head in a forward pass of its model."""

    hidden: torch.Tensor
    """The last hidden state, [1, 2, width]."""
    given: torch.Tensor
    """The input of the head."""
    is_last: bool
    """True if the head's output is returned as the logits."""


def _run_head(model: PreTrainedModel, width: int | None = None) -> _HeadRun | None:
    """Run a model with a stand-in for its body; None without a linear head, or if that fails.

    `width`: that of hidden states; None: that of the head's input.
    """
    head = model.get_output_embeddings()
    body = model.base_model
    if type(head) is not nn.Linear or body is model:
        return None
    hidden = torch.empty(1, 2, width or head.in_features, device="meta", dtype=head.weight.dtype)
    passed: list[torch.Tensor] = []

    def observe(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        passed[:] = inputs[0], output

    hook = head.register_forward_hook(observe)
    model.set_submodule(model.base_model_prefix, _Body(body, hidden))
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    logits = attempt(lambda: model(input_ids=ids).logits)
    hook.remove()
    model.set_submodule(model.base_model_prefix, body)
    if isinstance(logits, Raised) or not passed:  # it needs more than the last hidden state
        return None
    return _HeadRun(hidden, passed[0], logits is passed[1])


def is_word_by_word(model: PreTrainedModel) -> bool:
    """Return True if a token's embedding and logit depend only on its own row of each matrix.

    Runs both on the CPU with small matrices in place of the model's, once whole and once in parts.
    """
    head = model.get_output_embeddings()
    table = model.get_input_embeddings()
    body = model.base_model
    if type(head) is not nn.Linear or not isinstance(table, nn.Embedding) or body is model:
        return False
    name = next(n for n, m in model.named_modules() if m is head)
    width = head.in_features
    hidden = torch.arange(1.0, 1 + 3 * width).sin().reshape(1, 3, width)
    matrix = torch.arange(1.0, 1 + 12 * width).cos().reshape(12, width)

    def logits(of: nn.Module, given: torch.Tensor) -> torch.Tensor:
        model.set_submodule(name, of)
        model.set_submodule(model.base_model_prefix, _Body(body, given))
        ids = torch.zeros(1, 3, dtype=torch.long, device=given.device)
        return model(input_ids=ids).logits  # type: ignore[no-any-return]

    def head_of(rows: torch.Tensor) -> nn.Module:
        made = nn.Linear(width, len(rows), bias=False, device="meta")
        made.register_parameter("weight", nn.Parameter(rows))
        return made

    def vectors(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        part = copy(table)
        scales = {key: torch.ones_like(b, device="cpu") for key, b in table.named_buffers()}
        vars(part).update(_parameters={"weight": rows}, _buffers=scales, padding_idx=None)
        return part(ids)  # type: ignore[no-any-return]

    ids = torch.arange(5, 12)
    parts = matrix[:5], matrix[5:]

    def in_parts() -> bool:
        if logits(head, hidden.to("meta", head.weight.dtype)).shape[-1] != head.out_features:
            return False
        split = torch.cat([logits(head_of(part), hidden) for part in parts], -1)
        alike = torch.allclose(split, logits(head_of(matrix), hidden), rtol=1e-4, atol=1e-5)
        return alike and torch.equal(vectors(parts[1], ids - 5), vectors(matrix, ids))

    result = attempt(in_parts)
    model.set_submodule(model.base_model_prefix, body)
    model.set_submodule(name, head)
    return result is True
