"""What a token costs: by hand, and where experts sleep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training import LLAMA, VOCABULARY, spec_of
from trainer.models.flops import flops_per_token

SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
)
TOKENS = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
# family -> (what its config needs, parameters of a layer's routed experts, layers that have them,
# chosen, of how many)
MIXTURES: dict[str, tuple[dict[str, Any], int, int, int, int]] = {
    "mixtral": (dict(num_local_experts=8, num_experts_per_tok=2), 8 * 3 * 32 * 48, 2, 2, 8),
    "qwen3_moe": (
        dict(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=16, mlp_only_layers=[0]),
        4 * 3 * 32 * 16,
        1,
        1,
        4,
    ),
    "qwen2_moe": (  # its shared expert sees every token
        dict(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
        ),
        4 * 3 * 32 * 16,
        2,
        2,
        4,
    ),
    "gpt_oss": (
        dict(num_local_experts=4, num_experts_per_tok=2, **TOKENS),
        4 * (32 * 96 + 96 + 48 * 32 + 32),
        2,
        2,
        4,
    ),
    "granitemoe": (
        dict(num_local_experts=4, num_experts_per_tok=2, **TOKENS),
        4 * 3 * 32 * 48,
        2,
        2,
        4,
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_token_goes_through_the_experts_that_it_is_sent_to(name):
    more, routed, layers, chosen, experts = MIXTURES[name]
    spec = spec_of({"model_type": name, **SMALL, **more})
    assert spec.language.idle_parameters == layers * routed * (experts - chosen) // experts
    table = VOCABULARY * 32
    matrices = spec.parameters - table - spec.language.idle_parameters
    assert flops_per_token(spec, 128) == 6 * matrices + 6 * 2 * 32 * 128


def test_a_dense_model_has_no_idle_parameters():
    assert spec_of(LLAMA).language.idle_parameters == 0
