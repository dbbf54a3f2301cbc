"""DeepSpeed's AutoTP, by the model's own plan, against plain PyTorch in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.test_tensor import FAMILIES, TIED
from tests.training import Case, assert_near, assert_same, resume_by_engine, train_by_engine, train_plainly

TWO = Case("deepspeed", tensor=2, zero_stage=0, micro_batch=4, model=TIED)
FOUR = replace(TWO, world_size=4, micro_batch=2)
CASES = {
    "tied": TWO,
    **{name: replace(TWO, model=model) for name, model in FAMILIES.items() if name != "phi3"},
    "ZeRO-1, one data rank": replace(TWO, zero_stage=1),
    "x replicas": FOUR,
    "x ZeRO-1": replace(FOUR, zero_stage=1),
    "x ZeRO-2": replace(FOUR, zero_stage=2),
    "qwen3 x ZeRO-2, recompute": replace(FOUR, zero_stage=2, model=FAMILIES["qwen3"], recompute="full"),
    "gpt_neox x ZeRO-1, selective": replace(FOUR, zero_stage=1, model=FAMILIES["gpt_neox"], recompute="selective"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)
