"""Biases that balance experts follow the loads of a whole step, to the bit, in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.layouts import HOST, PARTS, by_engine, family
from tests.support.training import (
    Case,
    assert_same,
    resume_by_engine,
    train_by_engine,
    train_plainly,
)

ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
GLM = family("glm4_moe", n_routed_experts=4, first_k_dense_replace=1, head_dim=8, **ROUTED)
GLM |= {"n_group": 2, "topk_group": 1}
GLM_4 = GLM | {"num_hidden_layers": 4}
ERNIE = family("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
MINIMAX = family("minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=8)

ONE = Case(world_size=1, model=GLM, router_bias_rate=0.05)
TWO = replace(ONE, world_size=2)
FOUR = replace(ONE, world_size=4, micro_batch=1)
LAYOUTS = {
    "one rank": ONE,
    "one rank, ernie": replace(ONE, model=ERNIE),
    "ddp": replace(TWO, zero_stage=0),
    "ddp, full": replace(TWO, zero_stage=0, recompute="full"),
    "zero1": replace(TWO, zero_stage=1),
    "zero2, every 2": replace(TWO, recompute="every", every=2),
    "zero2, minimax": replace(TWO, model=MINIMAX),
    "zero3, ernie, selective": replace(TWO, zero_stage=3, model=ERNIE, recompute="selective"),
    "zero3, offload": replace(TWO, zero_stage=3, recompute="offload"),
    "zero3, all on the host": replace(TWO, zero_stage=3, **HOST),
    "hsdp, zero3": replace(FOUR, replicate=2, zero_stage=3),
    "pipeline": replace(TWO, pipeline=2, zero_stage=0, model=GLM_4),
    "pipeline, ZBVZeroBubble, full": replace(
        TWO, pipeline=2, zero_stage=0, schedule="ZBVZeroBubble", model=GLM_4, recompute="full"
    ),
    "pipeline x zero1": replace(FOUR, pipeline=2, zero_stage=1, model=GLM_4),
    "pipeline x zero3": replace(FOUR, pipeline=2, zero_stage=3, model=GLM_4),
    "tensor": replace(TWO, tensor=2, zero_stage=0),
    "tensor x zero2, sequence": replace(FOUR, tensor=2, more=PARTS),
    "tensor x zero3, sequence, full": replace(
        FOUR, tensor=2, more=PARTS, zero_stage=3, recompute="full"
    ),
    "context": replace(TWO, context=2),
    "context x zero3, full": replace(FOUR, context=2, zero_stage=3, recompute="full"),
    "experts": replace(TWO, expert=2),
    "experts over four, full": replace(FOUR, expert=4, zero_stage=3, recompute="full"),
    "tensor x experts": replace(FOUR, tensor=2, expert=2),
    "tensor x experts, sequence": replace(FOUR, tensor=2, expert=4, more=PARTS),
    "context x experts": replace(FOUR, context=2, expert=2, zero_stage=3),
    "pipeline x experts": replace(FOUR, pipeline=2, expert=2, model=GLM_4),
    "pipeline x tensor, sequence": replace(
        FOUR, pipeline=2, tensor=2, zero_stage=0, model=GLM_4, more=PARTS
    ),
    "compiled": replace(TWO, zero_stage=3, compile="blocks"),
    "compiled, selective": replace(TWO, zero_stage=3, compile="blocks", recompute="selective"),
}
CASES = {
    name: case
    for name, case in sorted(by_engine(LAYOUTS).items(), key=lambda pair: pair[1].world_size)
    if case.engine != "deepspeed" or case.tensor == 1  # AutoTP does not split experts
}
RESUMED = ("zero3, ernie, selective", "pipeline x zero3", "experts over four, full", "zero1")


@pytest.mark.parametrize("name", CASES)
def test_biases_move_as_in_one_process(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    biases = {name: value for name, value in reference.weights.items() if name.endswith("_bias")}
    assert biases and all(bool((value != 0).any()) for value in biases.values())
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)
        for key, value in biases.items():
            assert outcome.weights[key].tolist() == value.tolist(), key
