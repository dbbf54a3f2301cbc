"""The modules that tensor parallelism splits and refuses, by engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.layouts import (
    FAMILIES,
    LAYOUTS,
    SPLIT,
    SPLIT_4,
    TIED,
    WITHOUT_WORDS,
    by_engine,
    family,
)
from tests.support.messages import raises, shows
from tests.support.run.layout import layout
from tests.support.training import Case, assert_same, spec_of, train_by_engine, train_plainly
from trainer.config import load
from trainer.engines import ENGINES, select
from trainer.errors import ConfigError
from trainer.layout import Recompute

TWO_RANKS = layout(pipeline=1, replicate=1, shard=1, tensor=2, micro=1, accumulation=1)


@pytest.mark.more
def test_an_engine_that_comes_after_has_groups_of_its_own(pools):
    """DeepSpeed keeps groups in its modules, where the next engine would find them."""
    model = TIED | {"num_hidden_layers": 4}
    for case in (
        SPLIT_4,
        Case("deepspeed", world_size=4, zero_stage=2, micro_batch=1, model=model),
        replace(SPLIT_4, zero_stage=1, tensor=1, pipeline=2, micro_batch=1, model=model),
        Case("deepspeed", world_size=4, zero_stage=1, micro_batch=1, model=model),
        replace(SPLIT_4, zero_stage=2, tensor=4, model=TIED | {"num_key_value_heads": 4}),
    ):
        reference = train_plainly(case)
        for outcome in pools[4].run(train_by_engine, case=case):
            assert_same(outcome, reference, 2e-6)


@pytest.mark.parametrize("name", WITHOUT_WORDS)
def test_a_plan_that_it_has_no_words_for_is_refused(name):
    model = {key: value for key, value in FAMILIES[name].items() if "pdrop" not in key}
    with raises(ConfigError, "split as", "trainer.engine"):
        ENGINES["deepspeed"].check(spec_of(model), TWO_RANKS)


def test_by_itself_it_is_taken_for_what_no_other_engine_has():
    config = load(Path(__file__).parent.parent.parent / "ds_configs" / "zero2.json")
    assert select("auto", TWO_RANKS, config, "cpu")[0] == "mesh"
    assert select("auto", replace(TWO_RANKS, precision="float16"), config, "cpu")[0] == "deepspeed"
    assert (
        select("auto", replace(TWO_RANKS, offload_optimizer="cpu"), config, "cpu")[0] == "deepspeed"
    )


def test_no_rank_holds_a_whole_matrix(pools):
    for shapes in pools[2].run(held, case=replace(SPLIT, engine="mesh")):
        assert shapes == {
            "self_attn.q_proj": (16, 32),
            "self_attn.k_proj": (8, 32),
            "self_attn.o_proj": (32, 16),
            "mlp.up_proj": (24, 32),
            "mlp.down_proj": (32, 24),
        }


def held(case: Case) -> dict[str, tuple[int, ...]]:
    """Return local shapes of the first block's matrices. Runs on each rank."""
    import torch.distributed as dist

    from tests.support.training import build

    block = build(case, dist.get_rank()).modules[0].get_submodule("model.model.layers.0")
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    return {name: tuple(block.get_submodule(name).weight.to_local().shape) for name in names}


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


@pytest.mark.more
def test_what_deepspeed_adds_up_in_place_may_be_recomputed():
    """Without copies of it, gradients of Qwen3's blocks were wrong. Equality: the layouts'."""
    selective = replace(TWO_RANKS, recompute=Recompute("selective"))
    assert ENGINES["deepspeed"].refusal(selective) is None
    name = "deepspeed-tensor x ddp, qwen3, selective"
    assert name in by_engine(LAYOUTS)
    assert ENGINES["mesh"].refusal(selective) is None
