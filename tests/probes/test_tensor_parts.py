"""Whether matrices can be split over tensor ranks, with whole sequences between them or parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.layouts import TIED, family
from tests.support.messages import raises, shows
from tests.support.run.layout import layout
from tests.support.training import spec_of
from trainer.errors import ConfigError
from trainer.parallel.probes.tensor_parts import check

PLACE = "tensor_parallel.autotp_size: "


@pytest.mark.parametrize(
    ("model", "size", "keys"),
    [
        (
            family("diffllama", num_key_value_heads=4),
            2,
            ("diffllama: model.layers.*.self_attn.o_proj", "something else", "one process"),
        ),
        (family("llama"), 4, ("llama: 2 key-value heads = 0 x 4 + 2", "expected a multiple of 4")),
        (family("llama"), 3, ("llama: 4 attention heads = 1 x 3 + 1", "expected a multiple of 3")),
        (
            family("llama", intermediate_size=50),
            4,
            (
                (
                    "llama: model.layers.*.mlp.gate_proj.out_features = 50 = 12 x 4 + 2",
                    "expected a multiple of 4",
                )
            ),
        ),
        (
            family("llama", attention_dropout=0.1),
            2,
            ("model.layers.*.self_attn", "random numbers (dropout)"),
        ),
        (
            family("qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16),
            4,
            ("6 experts = 1 x 4 + 2", "expected a multiple of 4"),
        ),
        (
            family("llama4_text", num_local_experts=2, intermediate_size_mlp=48),
            2,
            ("feed_forward.experts", "the router's choice"),
        ),
    ],
    ids=["guessed", "key-value heads", "heads", "width", "dropout", "experts", "sorted rows"],
)
def test_what_can_not_be_split_is_refused_with_the_arithmetic(model, size, keys):
    from trainer.parallel.probes.tensor_parts import check

    with raises(ConfigError, *keys) as caught:
        check(spec_of(model), layout(1, 1, 1, size, 1, 1))
    assert str(caught.value).startswith(PLACE)
    shows(caught.value, "Change tensor_parallel.autotp_size", "1 trains")


WHOLE_ROWS = layout(1, 1, 1, 2, 1, 1)


DIVIDED = replace(WHOLE_ROWS, sequence_parallel=True)


def changed(name: str, change: Any) -> Any:
    """Return the spec of a model whose tiny copy has `change` added to what a module gives."""
    spec = spec_of(TIED)
    assert spec.tiny.copy is not None
    small = spec.tiny.copy()

    def build() -> torch.nn.Module:
        model = small.build()
        module = model.get_submodule(f"model.layers.0.{name}")
        plain = module.forward
        vars(module)["forward"] = lambda hidden: plain(hidden) + change(hidden)
        return model

    tiny = replace(spec.tiny, copy=lambda **_: small.built_by(build))
    return replace(spec, tiny=tiny)


@pytest.mark.more
def test_dropout_by_a_function_between_split_matrices_is_refused():
    spec = spec_of(family("starcoder2", residual_dropout=0.1))
    check(spec, WHOLE_ROWS)
    with raises(ConfigError, "draws random", "process draws"):
        check(spec, DIVIDED)


def test_tokens_mixed_between_split_matrices_are_refused():
    spec = changed("input_layernorm", lambda hidden: hidden.mean(1, keepdim=True))
    check(spec, WHOLE_ROWS)
    with raises(ConfigError, "input_layernorm computes something") as caught:
        check(spec, DIVIDED)
    assert "tensor_parallel.sequence_parallel: llama" in str(caught.value)


def test_a_use_of_hidden_states_beside_the_split_layers_is_refused():
    """Its gradient would count once on each rank."""
    spec = changed("mlp", lambda hidden: hidden)
    with raises(ConfigError, "gradient of", "layernorm.weight", "ranks"):
        check(spec, WHOLE_ROWS)
