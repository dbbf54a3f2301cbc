"""DeepSpeed's PipelineModule against one process: tied tables, dropout, ragged samples, accumulation, clipping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training import GPT2, LLAMA, Case, assert_near, assert_same, resume_by_engine, train_by_engine, train_plainly

LLAMA_4, GPT2_4 = LLAMA | {"num_hidden_layers": 4}, GPT2 | {"n_layer": 4}
TWO = Case("deepspeed", world_size=2, pipeline=2, zero_stage=0, micro_batch=2, model=LLAMA_4)
FOUR = replace(TWO, world_size=4, micro_batch=1)

CASES = {
    "ZeRO-0": TWO,
    "ZeRO-1, one shard": replace(TWO, zero_stage=1),
    "eight micro-batches": replace(TWO, micro_batch=1),
    "untied": replace(TWO, model=LLAMA_4 | {"tie_word_embeddings": False}),
    "GPT-2": replace(TWO, model=GPT2_4, zero_stage=1),
    "recompute full": replace(TWO, recompute="full", model=GPT2_4),
    "recompute selective": replace(TWO, recompute="selective", zero_stage=1),
    "replicas": FOUR,
    "ZeRO-1": replace(FOUR, zero_stage=1),
    "ZeRO-1, optimizer on the host": replace(FOUR, zero_stage=1, offload_optimizer="cpu"),
    "ZeRO-1, untied": replace(FOUR, zero_stage=1, model=LLAMA_4 | {"tie_word_embeddings": False}),
    "four stages": replace(FOUR, pipeline=4, micro_batch=2, model=LLAMA | {"num_hidden_layers": 5}),
    "four stages, ZeRO-1": replace(FOUR, pipeline=4, zero_stage=1),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


WIDE = {"data_types": {"grad_accum_dtype": "fp32"}}
LOW_PRECISION = {
    f"{precision}, ZeRO-{stage}{', float32 gradients' if more else ''}": replace(
        FOUR, precision=precision, zero_stage=stage, more=more
    )
    for precision in ("bfloat16", "float16")
    for stage, more in ((0, {}), (1, {}), (1, WIDE))
}


@pytest.mark.parametrize("case", LOW_PRECISION.values(), ids=LOW_PRECISION)
def test_low_precision_stays_near_float32(pools, case):
    case = replace(case, model=LLAMA_4 | {"attention_dropout": 0.0})
    reference = train_plainly(case)
    for outcome in pools[4].run(train_by_engine, case=case):
        assert_near(outcome, reference)


@pytest.mark.parametrize(
    "case",
    [FOUR, replace(FOUR, zero_stage=1), replace(FOUR, zero_stage=1, precision="bfloat16")],
    ids=["ZeRO-0", "ZeRO-1", "bfloat16"],
)
def test_a_resumed_run_goes_on_bit_for_bit(pools, tmp_path, case):
    for losses, weights in pools[4].run(resume_by_engine, before=case, after=case, folder=tmp_path):
        assert losses[0] == losses[1]
        assert weights[0].keys() == weights[1].keys()
        assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
