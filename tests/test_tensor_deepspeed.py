"""DeepSpeed's AutoTP, by the model's own plan, against plain PyTorch in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.test_layout import layout
from tests.test_tensor_torch import FAMILIES, TIED
from tests.training import (
    Case,
    assert_near,
    assert_same,
    resume_by_engine,
    spec_of,
    train_by_engine,
    train_plainly,
)
from trainer.engines import ENGINES, select
from trainer.errors import ConfigError

TWO = Case("deepspeed", tensor=2, zero_stage=0, micro_batch=4, model=TIED)
FOUR = replace(TWO, world_size=4, micro_batch=2)
CASES = {
    "tied": TWO,
    **{name: replace(TWO, model=model) for name, model in FAMILIES.items() if name not in ("phi3", "olmo2")},
    "ZeRO-1, one data rank": replace(TWO, zero_stage=1),
    "x replicas": FOUR,
    "x ZeRO-1": replace(FOUR, zero_stage=1),
    "x ZeRO-2": replace(FOUR, zero_stage=2),
    "x ZeRO-2, optimizer on the host": replace(FOUR, zero_stage=2, offload_optimizer="cpu"),
    "x ZeRO-2, overlapped": replace(FOUR, zero_stage=2, more={"tensor_parallel": {"tp_overlap_comm": True}}),
    "qwen3 x ZeRO-2, recompute": replace(FOUR, zero_stage=2, model=FAMILIES["qwen3"], recompute="full"),
    "gpt_neox x ZeRO-1, selective": replace(FOUR, zero_stage=1, model=FAMILIES["gpt_neox"], recompute="selective"),
    "four ranks": replace(FOUR, tensor=4, zero_stage=2, model=TIED | {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_low_precision_stays_near_float32(pools, precision, stage):
    case = replace(FOUR, precision=precision, zero_stage=stage)
    reference = train_plainly(case)
    for outcome in pools[4].run(train_by_engine, case=case):
        assert_near(outcome, reference)


SPLIT = layout(pipeline=1, replicate=1, shard=1, tensor=2, micro=1, accumulation=1)
BEFORE = {
    "ZeRO-0": FOUR,
    "ZeRO-1": replace(FOUR, zero_stage=1),
    "ZeRO-2, bfloat16": replace(FOUR, zero_stage=2, precision="bfloat16"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_resumed_run_goes_on_bit_for_bit(pools, tmp_path, name):
    case = BEFORE[name]
    for losses, weights in pools[4].run(resume_by_engine, before=case, after=case, folder=tmp_path):
        assert losses[0] == losses[1]
        assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_an_engine_that_comes_after_has_groups_of_its_own(pools):
    """DeepSpeed keeps groups in its modules, and the next engine of the process would take them for its own."""
    model = TIED | {"num_hidden_layers": 4}
    for case in (
        FOUR,
        Case("deepspeed", world_size=4, zero_stage=2, micro_batch=1, model=model),
        replace(FOUR, zero_stage=1, tensor=1, pipeline=2, micro_batch=1, model=model),
        Case("deepspeed", world_size=4, zero_stage=1, micro_batch=1, model=model),
        replace(FOUR, zero_stage=2, tensor=4, model=TIED | {"num_key_value_heads": 4}),
    ):
        reference = train_plainly(case)
        for outcome in pools[4].run(train_by_engine, case=case):
            assert_same(outcome, reference, 2e-6)


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_a_plan_that_it_has_no_words_for_is_refused(family):
    model = {key: value for key, value in FAMILIES[family].items() if "pdrop" not in key}
    with pytest.raises(ConfigError, match=r'rowwise_split_input.*Set trainer.engine to "mesh"'):
        ENGINES["deepspeed"].check(spec_of(model), SPLIT)


def test_by_itself_it_is_taken_for_what_no_other_engine_has():
    assert select("auto", SPLIT)[0] == "mesh"
    assert select("auto", replace(SPLIT, precision="float16"))[0] == "deepspeed"
    assert select("auto", replace(SPLIT, offload_optimizer="cpu"))[0] == "deepspeed"
