"""What is planned for a rank is what it takes: real ranks and pretended ones, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.layouts import LAYOUTS
from tests.support.planned import LENGTH, assert_as_planned, planned, subject_of
from tests.support.training import Case, layout_of, spec_in

CASES = [
    (
        "mesh",
        "lora, zero3",
    ),  # before DeepSpeed's ZeRO-3, which leaves another F.linear in the pool's processes
    ("mesh", "one rank"),
    ("mesh", "ddp"),
    ("accelerate", "ddp"),
    ("mesh", "zero2"),
    ("accelerate", "zero3"),
    ("mesh", "zero3, all on the host"),
    ("mesh", "zero3, gpt2, full"),
    ("deepspeed", "ddp"),
    ("deepspeed", "zero1"),
    ("deepspeed", "zero2"),
    ("deepspeed", "zero2, optimizer on the host"),
    ("deepspeed", "zero3"),
    ("mesh", "pipeline, ZBVZeroBubble"),
    ("mesh", "pipeline, selective"),
    ("mesh", "zero2, gpt2, offload"),
    ("mesh", "tensor"),
    ("deepspeed", "tensor"),
    ("mesh", "hsdp, zero3"),
    ("mesh", "hpZ"),
    ("accelerate", "hpZ"),
    ("accelerate", "hsdp, zero2"),
    ("mesh", "pipeline x zero2, DualPipeV"),
    ("mesh", "pipeline x zero3, Interleaved1F1B"),
    ("deepspeed", "pipeline x zero1"),
    ("mesh", "tensor x zero3"),
    ("deepspeed", "tensor x zero2"),
    ("mesh", "pipeline x tensor"),
    ("mesh", "pipeline x tensor x zero3"),
    ("mesh", "zero3, tiled, full"),
    ("deepspeed", "zero3, tiled, full"),
    ("mesh", "lora, zero2"),
    ("accelerate", "lora, zero2"),
    ("mesh", "four bits, zero2"),
    ("mesh", "four bits, zero3"),
    ("mesh", "four bits, tensor"),
    ("deepspeed", "four bits, zero2"),
    ("deepspeed", "four bits, zero3"),
]
FOUR_BITS = {"r": 4, "quantize": {"double_quant": True}}
LORA = {"r": 4, "alpha": 16, "dropout": 0.1}
KNOWN = LAYOUTS | {
    "lora, zero2": replace(LAYOUTS["zero2"], adapter=LORA),
    "lora, zero3": replace(LAYOUTS["zero3"], adapter=LORA),
    "four bits, zero2": replace(LAYOUTS["zero2"], adapter=FOUR_BITS),
    "four bits, zero3": replace(LAYOUTS["zero3"], adapter=FOUR_BITS),
    "four bits, tensor": replace(LAYOUTS["tensor"], adapter=FOUR_BITS),
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("engine", "name"), CASES, ids=[f"{engine}-{name}" for engine, name in CASES]
)
def test_a_rank_takes_what_was_planned(pools, engine, name):
    assert_as_planned(pools, replace(KNOWN[name], engine=engine))


@pytest.mark.first("mesh")
@pytest.mark.parametrize("engine", ["mesh", "accelerate"])
def test_below_zero_3_a_rank_keeps_a_frozen_base_once_and_gathers_none_of_it(engine):
    """FSDP2 would keep its shard, and all of the base while a step runs: on one rank 2.09 times."""
    case = replace(LAYOUTS["zero2"], engine=engine, precision="bfloat16", adapter=LORA)
    spec = spec_in(case)
    frozen = sum(spec.training.frozen.values())
    base = 2 * frozen
    adapter = 4 * (spec.parameters - frozen)
    usage = planned(case, 0)[0]
    bytes_of = usage.peaks["step 2"].by_kind
    kept = bytes_of["weights"] + bytes_of["communication"]
    assert base <= kept <= 1.05 * base + 3 * adapter
    gathered = [m.size for m in usage.messages if (m.phase, m.name) == ("step 2", "all-gather")]
    assert gathered and sum(gathered) <= 2 * adapter * case.accumulation


@pytest.mark.more
def test_what_blocks_are_given_is_planned_on_the_host():
    """Beside full recomputation, which keeps as much on the device."""
    case, kind = replace(LAYOUTS["zero2, gpt2, offload"], engine="mesh"), "block inputs"
    offload, full = (planned(one, 0)[0].peaks for one in (case, replace(case, recompute="full")))
    away = max(peak.by_kind.get(kind, 0) for peak in offload.values())
    assert away and not any(kind in peak.by_kind for peak in full.values())


def pairs(case: Case) -> Any:
    """Return the subject of a tiny language model on pairs of answers."""
    from trainer.config import TrainerSection
    from trainer.models.spec import NoWeights
    from trainer.recipes.pairs.planned import planned_pairs

    data = {"path": "pairs.jsonl", "sequence_length": LENGTH}
    requests = {"task": "pairs", "model": {"config": case.model}, "data": data}
    known = planned_pairs(TrainerSection.model_validate(requests))
    spec = spec_in(case).with_weights(NoWeights())
    return subject_of(case, layout_of(case), spec, known.task(spec), known.batch)


@pytest.mark.more
@pytest.mark.parametrize(
    ("engine", "name"),
    [("mesh", "zero2"), ("deepspeed", "zero3"), ("mesh", "tensor"), ("mesh", "one rank")],
)
def test_pairs_take_what_was_planned(pools, engine, name):
    assert_as_planned(pools, replace(LAYOUTS[name], engine=engine), of=pairs)
