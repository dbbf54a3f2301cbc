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
    ("mesh", "four bits, zero2"),
    ("mesh", "four bits, zero3"),
    ("mesh", "four bits, tensor"),
    ("deepspeed", "four bits, zero2"),
    ("deepspeed", "four bits, zero3"),
]
FOUR_BITS = {"r": 4, "quantize": {"double_quant": True}}
KNOWN = LAYOUTS | {
    "lora, zero3": replace(LAYOUTS["zero3"], adapter={"r": 4, "alpha": 16, "dropout": 0.1}),
    "four bits, zero2": replace(LAYOUTS["zero2"], adapter=FOUR_BITS),
    "four bits, zero3": replace(LAYOUTS["zero3"], adapter=FOUR_BITS),
    "four bits, tensor": replace(LAYOUTS["tensor"], adapter=FOUR_BITS),
}


@pytest.mark.first("mesh-zero2")
@pytest.mark.parametrize(
    ("engine", "name"), CASES, ids=[f"{engine}-{name}" for engine, name in CASES]
)
def test_a_rank_takes_what_was_planned(pools, engine, name):
    assert_as_planned(pools, replace(KNOWN[name], engine=engine))


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
