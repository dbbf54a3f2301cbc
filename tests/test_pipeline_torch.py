"""Pipelines on the mesh engine against one process: every schedule, times ZeRO, times HSDP, times checkpointing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training import GPT2, LLAMA, Case, assert_same, resume_by_engine, train_by_engine, train_plainly

LLAMA_4, GPT2_4 = LLAMA | {"num_hidden_layers": 4}, GPT2 | {"n_layer": 4}
# tied tables on the first and the last stage, dropout, ragged samples, clipping, accumulation
TWO = Case("mesh", world_size=2, pipeline=2, zero_stage=0, micro_batch=2, model=LLAMA_4)
FOUR = replace(TWO, world_size=4, micro_batch=1)

CASES = {
    "1F1B": TWO,
    "GPipe": replace(TWO, schedule="GPipe"),
    "Interleaved1F1B": replace(TWO, schedule="Interleaved1F1B"),
    "InterleavedZeroBubble": replace(TWO, schedule="InterleavedZeroBubble"),
    "ZBVZeroBubble": replace(TWO, schedule="ZBVZeroBubble"),
    "DualPipeV": replace(TWO, schedule="DualPipeV"),
    "untied": replace(TWO, model=LLAMA_4 | {"tie_word_embeddings": False}),
    "GPT-2: dropout after the tables": replace(TWO, model=GPT2_4),
    "ZBVZeroBubble, hidden states that are views": replace(TWO, model=GPT2_4, schedule="ZBVZeroBubble"),
    "recompute full": replace(TWO, recompute="full", model=GPT2_4),
    "recompute every": replace(TWO, recompute="every", every=2),
    "recompute selective": replace(TWO, recompute="selective"),
    "ZeRO-1": replace(TWO, zero_stage=1),
    "ZeRO-2, one shard": replace(TWO, zero_stage=2),
    "three stages' worth of blocks": replace(FOUR, pipeline=4, model=LLAMA | {"num_hidden_layers": 5}),
    "replicas": FOUR,
    "ZeRO-2": replace(FOUR, zero_stage=2),
    "ZeRO-3": replace(FOUR, zero_stage=3),
    "ZeRO-3, GPipe, recompute": replace(FOUR, zero_stage=3, schedule="GPipe", recompute="full", model=GPT2_4),
    "ZeRO-3, Interleaved1F1B": replace(FOUR, zero_stage=3, schedule="Interleaved1F1B"),
    "ZeRO-2, InterleavedZeroBubble": replace(FOUR, zero_stage=2, schedule="InterleavedZeroBubble"),
    "ZeRO-2, ZBVZeroBubble": replace(FOUR, zero_stage=2, schedule="ZBVZeroBubble"),
    "ZeRO-2, DualPipeV": replace(FOUR, zero_stage=2, schedule="DualPipeV"),
    "ZeRO-2, ZBVZeroBubble, recompute": replace(FOUR, zero_stage=2, schedule="ZBVZeroBubble", recompute="full"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


def test_with_hsdp_on_eight_ranks(pools):
    """Every axis but `tensor`: pipeline 2 x replicate 2 x shard 2."""
    case = replace(TWO, world_size=8, replicate=2, micro_batch=1, zero_stage=3, recompute="full")
    reference = train_plainly(case)
    for outcome in pools[8].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FOUR, FOUR),
        (replace(FOUR, zero_stage=3), replace(FOUR, zero_stage=3)),
        (replace(FOUR, zero_stage=2, schedule="DualPipeV"), replace(FOUR, zero_stage=2, schedule="DualPipeV")),
    ],
    ids=["replicas", "ZeRO-3", "DualPipeV"],
)
def test_a_resumed_run_goes_on_bit_for_bit(pools, tmp_path, before, after):
    for losses, weights in pools[4].run(resume_by_engine, before=before, after=after, folder=tmp_path):
        assert losses[0] == losses[1]
        assert weights[0].keys() == weights[1].keys()
        assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


# nothing drops: another layout draws otherwise
STILL = LLAMA_4 | {"attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FOUR, Case("mesh", world_size=4, zero_stage=3, micro_batch=1)),
        (Case("deepspeed", world_size=4, zero_stage=1, micro_batch=1), replace(FOUR, zero_stage=2)),
        (replace(FOUR, schedule="ZBVZeroBubble"), replace(FOUR, pipeline=4, zero_stage=0)),
    ],
    ids=["pipeline to FSDP", "DeepSpeed to pipeline", "folded to four stages"],
)
def test_a_checkpoint_goes_on_in_another_layout(pools, tmp_path, before, after):
    before, after = replace(before, model=STILL), replace(after, model=STILL)
    for losses, _ in pools[4].run(resume_by_engine, before=before, after=after, folder=tmp_path):
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
