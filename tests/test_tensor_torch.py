"""Tensor parallelism on the mesh engine against plain PyTorch in one process, alone and times ZeRO."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.test_layout import layout
from tests.training import GPT2, LLAMA, Case, assert_same, resume_by_engine, train_by_engine, train_plainly

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


@pytest.mark.parametrize(
    "case",
    [
        replace(FOUR, pipeline=2, micro_batch=2, model=TIED | {"num_hidden_layers": 4}),
        replace(FOUR, world_size=8, pipeline=2, zero_stage=3, micro_batch=1, model=TIED | {"num_hidden_layers": 4}),
        replace(FOUR, world_size=8, replicate=2, zero_stage=3, micro_batch=1, model=FAMILIES["qwen3"]),
    ],
    ids=["x pipeline", "x pipeline x zero3 on eight ranks", "x hsdp on eight ranks"],
)
def test_with_every_other_axis(pools, case):
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resumed_run_goes_on_bit_for_bit(pools, tmp_path, stage):
    case = replace(FOUR, zero_stage=stage, model=FAMILIES["qwen3"])
    for losses, weights in pools[4].run(resume_by_engine, before=case, after=case, folder=tmp_path):
        assert losses[0] == losses[1]
        assert all((weights[0][name] == weights[1][name]).all() for name in weights[1])


def test_bfloat16_stays_near_float32(pools):
    case = replace(FOUR, zero_stage=2, precision="bfloat16")
    reference = train_plainly(case)
    for outcome in pools[4].run(train_by_engine, case=case):
        assert outcome.losses == pytest.approx(reference.losses, rel=0.02)
        assert outcome.norms == pytest.approx(reference.norms, rel=0.05)


def test_no_rank_holds_a_whole_matrix(pools):
    for shapes in pools[2].run(held, case=TENSOR):
        assert shapes == {
            "self_attn.q_proj": (16, 32),
            "self_attn.k_proj": (8, 32),
            "self_attn.o_proj": (32, 16),
            "mlp.up_proj": (24, 32),
            "mlp.down_proj": (32, 24),
        }


def held(case: Case) -> dict[str, tuple[int, ...]]:
    """Local shapes of the first block's matrices. Runs on each rank."""
    import torch.distributed as dist

    from tests.training import build

    block = build(case, dist.get_rank()).modules[0].get_submodule("model.model.layers.0")
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    return {name: tuple(block.get_submodule(name).weight.to_local().shape) for name in names}


PLACE = "tensor_parallel.autotp_size: "


@pytest.mark.parametrize(
    ("model", "size", "text"),
    [
        (GPT2, 2, PLACE + "gpt2: its family has no tensor plan in transformers; expected a model with"),
        (family("llama"), 4, "llama: 2 key-value heads = 0 x 4 + 2; expected a multiple of 4"),
        (family("llama"), 3, "llama: 4 attention heads = 1 x 3 + 1; expected a multiple of 3"),
        (
            family("llama", intermediate_size=50),
            4,
            "llama: model.layers.*.mlp.gate_proj.out_features = 50 = 12 x 4 + 2; expected a multiple of 4",
        ),
        (
            family("llama", attention_dropout=0.1),
            2,
            "attention_dropout = 0.1, inside what is split: each rank would drop other values than one process",
        ),
        (
            family("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
            2,
            "is to be split as",
        ),
    ],
    ids=["no plan", "key-value heads", "heads", "width", "dropout", "experts"],
)
def test_what_can_not_be_split_is_refused_with_the_arithmetic(model, size, text):
    from tests.training import spec_of
    from trainer.errors import ConfigError
    from trainer.parallel.tensor import check

    with pytest.raises(ConfigError) as caught:
        check(spec_of(model), layout(1, 1, 1, size, 1, 1))
    assert text in str(caught.value)
    assert str(caught.value).endswith("Change tensor_parallel.autotp_size; 1 trains every model.")
