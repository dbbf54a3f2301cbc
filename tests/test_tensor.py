"""Tensor parallelism on the mesh engine against plain PyTorch in one process, alone and times ZeRO."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training import LLAMA, Case, assert_same, train_by_engine, train_plainly

SIZES = {key: LLAMA[key] for key in LLAMA if key not in ("attention_dropout", "model_type", "tie_word_embeddings")}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def family(model_type: str, **values: object) -> dict[str, object]:
    return {"model_type": model_type, **SIZES, **TOKENS, "tie_word_embeddings": False, **values}


TIED = family("llama", tie_word_embeddings=True)
FAMILIES = {
    "llama, biases": family("llama", attention_bias=True, mlp_bias=True),
    "qwen2": family("qwen2"),
    "qwen3": family("qwen3", head_dim=16),
    "mistral": family("mistral"),
    "gemma2": family("gemma2", tie_word_embeddings=True, head_dim=8),
    "olmo2": family("olmo2"),
    "phi3": family("phi3", resid_pdrop=0.1, embd_pdrop=0.1),
    "gpt_neox": family("gpt_neox", hidden_dropout=0.1),
}
TENSOR = Case(engine="mesh", tensor=2, zero_stage=0, micro_batch=4, model=TIED)
FOUR = replace(TENSOR, world_size=4, micro_batch=2)
CASES = {
    "tied": TENSOR,
    **{name: replace(TENSOR, model=model) for name, model in FAMILIES.items()},
    "zero2, one data rank": replace(TENSOR, zero_stage=2),
    "x replicate": FOUR,
    "x zero2": replace(FOUR, zero_stage=2),
    "x zero3": replace(FOUR, zero_stage=3),
    "qwen3 x zero3, full": replace(FOUR, zero_stage=3, model=FAMILIES["qwen3"], recompute="full"),
    "qwen3 x replicate, selective": replace(FOUR, model=FAMILIES["qwen3"], recompute="selective"),
    "gpt_neox x zero2, selective": replace(FOUR, zero_stage=2, model=FAMILIES["gpt_neox"], recompute="selective"),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_process_does(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)
