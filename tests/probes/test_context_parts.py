"""Whether sequences can be divided over context ranks: what is unsupported, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.layouts import EXPERTS, HYBRID, PARTS, TIED, family
from tests.support.messages import shows
from tests.support.training import GPT2, Case, layout_of, spec_in, task_of
from trainer.errors import ConfigError
from trainer.parallel.probes import context_parts
from trainer.probes.question import Probed, ask

CONTEXT = Case(context=2, micro_batch=4, model=TIED)


def checked(model: dict[str, Any], packed: bool = False, **axes: Any) -> str:
    """Return why rows of a model can't be divided; empty if they can."""
    case = replace(CONTEXT, model=model, **axes)
    spec = spec_in(case)
    try:
        about = Probed(spec, task_of(spec, case), layout_of(case), packed=packed)
        ask(context_parts.QUESTION, about)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("packed", [False, True], ids=["ragged", "packed"])
@pytest.mark.parametrize(
    "model",
    [
        TIED,
        GPT2 | {"attn_pdrop": 0.0},
        family("phi3", resid_pdrop=0.1, embd_pdrop=0.1),
        family("mistral", sliding_window=4),
        EXPERTS,
        TIED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        TIED | {"num_key_value_heads": 1},
        TIED | {"num_attention_heads": 1, "num_key_value_heads": 1},
        family("gpt_oss", sliding_window=4, num_local_experts=4),
        HYBRID,
        HYBRID | {"num_attention_heads": 1, "num_key_value_heads": 1},
        family("mamba", state_size=8),
    ],
    ids=[
        *("llama", "gpt2", "dropout", "window", "experts", "rotary that grows", "one kv head"),
        *("one head", "sinks", "hybrid", "hybrid, one head", "recurrent"),
    ],
)
def test_rows_are_divided(model, packed):
    assert checked(model, packed) == ""


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (TIED | {"attention_dropout": 0.1}, ("dropout of 0.1", "for all heads")),
        (EXPERTS | {"output_router_logits": True}, ("router's loss",)),
        (family("xlstm"), ("layer with state", "tensor of shape")),
    ],
    ids=["dropout in attention", "router's loss", "a state beside the tokens"],
)
def test_a_model_is_refused_with_the_reason(model, keys):
    result = checked(model)
    assert result.startswith("sequence_parallel_size: ")
    shows(result, *keys, "Remove it", "1")


def test_a_layer_with_state_that_is_not_found_is_refused(monkeypatch):
    monkeypatch.setattr("trainer.recipes.causal_lm.task.mixers_of", lambda *_: frozenset())
    shows(checked(HYBRID), "sequence_parallel_size", "outside attention", "differs by")


def test_a_layer_with_state_that_draws_is_refused():
    """A rank would draw for whole documents, and one process draws for whole sequences."""
    adapter = {"r": 2, "dropout": 0.1, "targets": ["in_proj"]}
    shows(checked(HYBRID, adapter=adapter), "layer with state", "draws random numbers")
    assert checked(HYBRID, adapter=adapter | {"dropout": 0.0}) == ""


def test_whole_documents_and_parts_of_tensor_ranks_are_refused():
    axes = {"tensor": 2, "world_size": 4, "more": PARTS}
    shows(checked(HYBRID, **axes), "layers with state", "tensor_parallel.sequence_parallel")
    assert checked(HYBRID, **axes | {"more": {}}) == ""


class _Mixing(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(1, keepdim=True)


class _Functional(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(hidden, 0.5, self.training)


@pytest.mark.parametrize("layer", [_Mixing, _Functional])
@pytest.mark.parametrize("place", ["model.layers.0.input_layernorm", "model.norm"])
def test_what_mixes_tokens_or_draws_for_a_part_is_found(layer, place):
    from trainer.models import materialise

    plain = materialise.on_host

    def planted(spec: Any) -> torch.nn.Module:
        model = plain(spec)
        model.get_submodule(place).register_forward_hook(lambda m, i, output: layer()(output))
        return model

    with patch("trainer.probes.probe.on_host", planted):
        assert "mixes tokens" in checked(TIED)
