"""The modules that tensor parallelism splits and refuses, by engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.layouts import FAMILIES, LAYOUTS, SPLIT, SPLIT_4, TIED, WITHOUT_WORDS, by_engine
from tests.support.messages import raises
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


@pytest.mark.more
def test_what_deepspeed_adds_up_in_place_may_be_recomputed():
    """Without copies of it, gradients of Qwen3's blocks were wrong. Equality: the layouts'."""
    selective = replace(TWO_RANKS, recompute=Recompute("selective"))
    assert ENGINES["deepspeed"].refusal(selective) is None
    name = "deepspeed-tensor x ddp, qwen3, selective"
    assert name in by_engine(LAYOUTS)
    assert ENGINES["mesh"].refusal(selective) is None
