"""Ragged micro-batches under dropout and noise: every layout draws what one process draws.

What is drawn depends on the width of a micro-batch, and a pipeline pads those of a step to one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.training import GPT2, Case, assert_same, train_by_engine, train_plainly

DRAWING = {**GPT2, "n_layer": 4}
NOISY = {**DRAWING, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DROPS_NO_SCORES = {**DRAWING, "attn_pdrop": 0.0}
ONE = Case("mesh", world_size=1, zero_stage=0, model=DRAWING)
LAYOUTS = {
    "pipeline": replace(ONE, world_size=2, pipeline=2),
    "pipeline, deepspeed": replace(ONE, engine="deepspeed", world_size=2, pipeline=2),
    "pipeline, noise": replace(ONE, world_size=2, pipeline=2, model=NOISY, neftune_alpha=5.0),
    "ddp": replace(ONE, world_size=2),
    "zero3": replace(ONE, world_size=2, zero_stage=3),
    "zero3, deepspeed": replace(ONE, engine="deepspeed", world_size=2, zero_stage=3),
    "tensor": replace(ONE, world_size=2, tensor=2),
    "context": replace(ONE, world_size=2, context=2, zero_stage=2, model=DROPS_NO_SCORES),
}


@pytest.mark.first("tensor", "pipeline, noise", "zero3, deepspeed")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_draws_what_one_process_draws(pools: Any, name: str) -> None:
    """By the engine itself on one rank, where there are as many data ranks, and by PyTorch."""
    case = LAYOUTS[name]
    references = [train_plainly(case)]
    if case.data_ranks == 1:
        alone = replace(case, engine="mesh", world_size=1, pipeline=1, tensor=1, context=1)
        references += pools[1].run(train_by_engine, case=alone)
    for outcome in pools[2].run(train_by_engine, case=case):
        for reference in references:
            assert_same(outcome, reference, 1e-6)
