"""DeepSpeed's PipelineModule against one process: tied tables, dropout, ragged samples, accumulation, clipping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training import GPT2, LLAMA, Case, assert_same, resume_by_engine, train_by_engine, train_plainly

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
