"""The DeepSpeed engine against plain PyTorch in one process: losses, every gradient, norms, weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.training import GPT2, LLAMA, Case, assert_near, assert_same, resume_by_engine, train_by_engine, train_plainly

CASES = {
    "ddp": Case(zero_stage=0),
    "zero1": Case(zero_stage=1),
    "zero2": Case(zero_stage=2),
    "zero3": Case(zero_stage=3),
    "one rank": Case(world_size=1, zero_stage=2),
    "no accumulation": Case(zero_stage=2, micro_batch=4),
    "micro-batch of one": Case(zero_stage=3, micro_batch=1),
    "gpt2, ddp": Case(zero_stage=0, model=GPT2),
    "gpt2, zero2": Case(zero_stage=2, model=GPT2),
    "gpt2, zero3": Case(zero_stage=3, model=GPT2),
    "untied, zero3": Case(zero_stage=3, model={**LLAMA, "tie_word_embeddings": False}),
    "gpt2, zero2, full": Case(zero_stage=2, model=GPT2, recompute="full"),
    "gpt2, zero2, every 2": Case(zero_stage=2, model=GPT2, recompute="every", every=2),
    "gpt2, zero2, selective": Case(zero_stage=2, model=GPT2, recompute="selective"),
    "gpt2, zero3, full": Case(zero_stage=3, model=GPT2, recompute="full"),
    "gpt2, zero3, every 2": Case(zero_stage=3, model=GPT2, recompute="every", every=2),
    "gpt2, zero3, selective": Case(zero_stage=3, model=GPT2, recompute="selective"),
    "zero2, optimizer on the host": Case(zero_stage=2, offload_optimizer="cpu"),
    "zero3, all on the host": Case(zero_stage=3, offload_optimizer="cpu", offload_param="cpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_process_does(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


LOW_PRECISION = [
    Case(precision=precision, zero_stage=stage) for precision in ("bfloat16", "float16") for stage in (0, 1, 2, 3)
]


@pytest.mark.parametrize("case", LOW_PRECISION, ids=lambda case: f"{case.precision}, zero{case.zero_stage}")
def test_low_precision_stays_near_float32(pools, case):
    case = replace(case, model={**LLAMA, "attention_dropout": 0.0})
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_near(outcome, reference)


RESUMED = [
    *(Case(zero_stage=stage) for stage in (0, 1, 2, 3)),
    *(Case(zero_stage=stage, precision="bfloat16") for stage in (0, 1, 2, 3)),
    *(Case(zero_stage=stage, precision="float16") for stage in (1, 3)),
    Case(zero_stage=2, offload_optimizer="cpu"),
    Case(zero_stage=3, offload_optimizer="cpu", offload_param="cpu"),
    Case(zero_stage=2, model=GPT2),
]


def label(case: Case) -> str:
    return f"{case.precision}, zero{case.zero_stage}, {case.offload_optimizer}, {case.model['model_type']}"


@pytest.mark.parametrize("case", RESUMED, ids=label)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(pools, tmp_path, case):
    for losses, weights in pools[2].run(resume_by_engine, before=case, after=case, folder=tmp_path):
        assert losses[0] == losses[1]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 2), (2, 1), (1, 0)])
def test_a_checkpoint_goes_on_under_another_stage(pools, tmp_path, before, after):
    cases = {"before": Case(zero_stage=before), "after": Case(zero_stage=after)}
    for losses, weights in pools[2].run(resume_by_engine, folder=tmp_path, **cases):
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
        assert all(torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=2e-6) for name in weights[1])
