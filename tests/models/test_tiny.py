"""The tiny copy is the architecture: its kinds of blocks in their transitions, and sizes that still
fit one another.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from tests.support.messages import shows_each
from tests.support.training import spec_of


def tiny(layers: int = 3, split: int = 1, **config: Any) -> Any:
    spec = spec_of(config).tiny.copy(layers, split)
    assert spec.parameters < 2_000_000
    return spec


def test_it_keeps_what_a_model_is():
    small = tiny(
        model_type="gemma2",
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
    ).config
    assert set(small["layer_types"]) == {"sliding_attention", "full_attention"}
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["hidden_size"]) == (
        4,
        2,
        72,
    )
    assert small["final_logit_softcapping"] == 30.0
    moe = tiny(model_type="qwen3_moe", num_experts=128, attention_dropout=0.25).config
    assert (moe["num_local_experts"], moe["num_experts_per_tok"], moe["attention_dropout"]) == (
        4,
        2,
        0.25,
    )


GPTJ = {"model_type": "gptj", "n_layer": 28}
LONGROPE: dict[str, Any] = {
    "model_type": "phi3",
    "pad_token_id": 0,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 100 for i in range(48)],
        "long_factor": [2.0 + i for i in range(48)],
        "original_max_position_embeddings": 4096,
    },
}
SIZES = {
    "rotary_dim": GPTJ,
    "codegen": {"model_type": "codegen"},
    "state-space heads x size = 2 x hidden": {"model_type": "mamba2"},
    "state-space heads beside attention": {"model_type": "bamba"},
    "shared blocks with adapters": {"model_type": "zamba2"},
    "state-space and experts": {"model_type": "granitemoehybrid"},
    "longrope": LONGROPE,
    "other heads in some layers": {"model_type": "gemma4_text"},
    "latent attention": {"model_type": "deepseek_v3"},
    "rotary in three sections": {"model_type": "qwen3_5_text"},
    "width of its own for words": {
        "model_type": "opt",
        "word_embed_proj_dim": 512,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "do_layer_norm_before": False,
    },
    "71 heads": {"model_type": "falcon", "num_attention_heads": 71, "hidden_size": 4544},
    "a vision tower": {"model_type": "gemma3"},
}


@pytest.mark.parametrize("config", SIZES.values(), ids=SIZES)
def test_sizes_that_depend_on_one_another_still_fit(config):
    assert tiny(**config).tiny.lacks == ()


KINDS = {
    "dense, then experts": {"model_type": "deepseek_v3"},
    "five windows, one full": {"model_type": "gemma3_text"},
    "full from the bottom, windows on top": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "use_sliding_window": True,
        "max_window_layers": 21,
    },
    "linear and full attention": {"model_type": "qwen3_next"},
    "state-space and attention": {"model_type": "bamba", "attn_layer_indices": [5, 14, 23]},
    "every second one with experts": {"model_type": "jamba"},
}


def words(spec: Any) -> list[str]:
    """Each block as PyTorch prints it, and what its attention looks at, without a number."""
    model = spec.build()
    results = []
    for block in map(model.get_submodule, spec.blocks):
        windows = [getattr(m, "sliding_window", "none") is not None for m in block.modules()]
        results.append(re.sub(r"\d+", "*", str(block)) + str(windows))
    return results


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_each_kind_of_block_and_each_transition_is_in_the_copy(config):
    spec = spec_of(config)
    small = spec.tiny.copy()
    assert len(small.blocks) < len(spec.blocks)
    assert len(set(words(spec))) > 1
    assert set(pairwise(words(small))) == set(pairwise(words(spec)))
    assert small.tiny.lacks == ()


def test_what_is_a_multiple_of_the_tensor_ranks_stays_one_and_what_is_none_stays_none():
    for heads, kv, ranks in ((32, 8, 4), (32, 8, 8), (9, 3, 2), (14, 2, 2), (14, 2, 4)):
        sizes = {"hidden_size": 64 * heads, "num_attention_heads": heads, "num_key_value_heads": kv}
        config = tiny(split=ranks, model_type="llama", **sizes).config
        assert (config["num_attention_heads"] % ranks == 0) == (heads % ranks == 0)
        assert (config["num_key_value_heads"] % ranks == 0) == (kv % ranks == 0)


def test_what_the_copy_lacks_is_said():
    from trainer.models.tiny import structure_of

    spec = spec_of({"model_type": "gemma3_text"})
    full = structure_of(spec.build(), spec.blocks)
    short = structure_of(spec.build(), spec.blocks[:3])
    assert list(full.lacks(short)) == ["a block like model.layers.5"]
    shows_each(
        list(full.lacks(structure_of(spec.build(), spec.blocks[3:6]))),
        ("step", "model.layers.5", "model.layers.6"),
    )


@pytest.mark.parametrize(("family", "whole"), [("glm4_moe", False), ("qwen3", True)])
def test_a_vocabulary_that_makes_the_copy_slow_is_cut_and_no_other(family, whole):
    from trainer.certify import tiny_run
    from trainer.recipes.causal_lm import certificate as language_case

    spec = spec_of({"model_type": family})
    config = {"train_batch_size": 6, "trainer": {"model": {"config": {"model_type": family}}}}
    run, size = language_case.with_copy(tiny_run.tiny_run(config, [], 3), spec)
    copy = spec.tiny.copy(*size)
    ids = copy.language.vocabulary
    assert (ids == spec.language.vocabulary) is whole
    assert f"ids up to {ids - 1:,}" in run.changes[-1]
    assert (f"(the model has {spec.language.vocabulary:,}" in run.changes[-1]) is not whole
    assert copy.parameters <= language_case.PARAMETERS
