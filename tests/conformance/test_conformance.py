"""Every engine in every layout that it offers, against plain PyTorch in one process.

Losses, every gradient by name, the clip norm, evaluation and the weights after some steps, with
tied tables, dropout, ragged samples, unequal target counts, accumulation and clipping on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version

from tests.support.layouts import LAYOUTS, PRECISIONS, RESUMED, by_engine
from tests.support.training import (
    assert_near,
    assert_same,
    resume_by_engine,
    train_by_engine,
    train_plainly,
)
from trainer.engines import ENGINES

CASES = by_engine(LAYOUTS)
LOW = by_engine(PRECISIONS)
STOPPED = by_engine({name: LAYOUTS[name] for name in RESUMED})
STOPPED |= by_engine(
    {f"bfloat16, {n}": replace(LAYOUTS[n], precision="bfloat16") for n in ("zero2", "zero3")}
)
STOPPED |= by_engine(
    {f"float16, {n}": replace(LAYOUTS[n], precision="float16") for n in ("zero1", "zero3")}
)


OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.3")
OLD_TORCH = torch.__version__ < "2.15"


@pytest.mark.skipif(OLD_TORCH, reason="the V-shaped schedules need PyTorch 2.15")
def test_every_layout_is_offered_and_every_engine_takes_part():
    offered = {name: [e for e in ENGINES if f"{e}-{name}" in CASES] for name in LAYOUTS}
    assert [name for name, engines in offered.items() if not engines] == []
    # "mesh" runs all that is not DeepSpeed's alone
    alone = {name for name, engines in offered.items() if engines == ["deepspeed"]}
    assert all("host" in name for name in alone)
    assert all(sum(engine in engines for engines in offered.values()) >= 15 for engine in ENGINES)


@pytest.mark.first(
    "mesh-one rank",
    "deepspeed-ddp",
    "accelerate-ddp, gpt2, full",
    "mesh-zero1",
    "deepspeed-zero2",
    "accelerate-zero2, gpt2, every 2",
    "mesh-zero3",
    "deepspeed-zero3, gpt2, selective",
    "accelerate-zero3, all on the host",
    "mesh-pipeline",
    "mesh-pipeline, ZBVZeroBubble",
    "deepspeed-tensor, qwen3",
    "mesh-tensor, qwen3",
    "accelerate-hsdp, zero3",
    "mesh-hsdp, zero3",
    "deepspeed-pipeline x zero1",
    "mesh-pipeline x zero2, DualPipeV",
    "mesh-tensor x zero3",
    "deepspeed-experts, half of them",
    "mesh-experts, hsdp, selective",
)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(pools, name):
    case = CASES[name]
    if OLD_TRANSFORMERS and case.model["model_type"] == "qwen3" and case.tensor > 1:
        pytest.skip("transformers 5.2 is 7e-6 off with Qwen3 under tensor parallelism; 5.24 is not")
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


@pytest.mark.first("deepspeed-float16, zero2", "deepspeed-bfloat16, zero3", "mesh-bfloat16, zero3")
@pytest.mark.parametrize("name", LOW)
def test_low_precision_stays_near_float32(pools, name):
    case = replace(LOW[name], model=LOW[name].model | {"attention_dropout": 0.0})
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_near(outcome, reference)


@pytest.mark.first("accelerate-hsdp, zero3", "mesh-pipeline x zero3")
@pytest.mark.parametrize("name", STOPPED)
def test_a_resumed_run_goes_on_bit_for_bit(pools, tmp_path, name):
    case = STOPPED[name]
    for losses, weights in pools[case.world_size].run(
        resume_by_engine, before=case, after=case, folder=tmp_path
    ):
        assert losses[0] == losses[1]
        assert weights[0].keys() == weights[1].keys()
        assert [
            name for name in weights[1] if not torch.equal(weights[0][name], weights[1][name])
        ] == []
