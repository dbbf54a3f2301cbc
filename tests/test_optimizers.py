"""Our schedules against DeepSpeed's own classes, update by update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.optim.lr_schedules import schedule_of

rates = st.floats(1e-6, 1e-1)
steps = st.integers(1, 12)
warm = {"warmup_num_steps": steps, "warmup_type": st.sampled_from(["log", "linear"])}
PARAMS = {
    "WarmupLR": st.fixed_dictionaries(warm, optional={"warmup_min_lr": rates, "warmup_max_lr": rates}),
    "WarmupDecayLR": st.fixed_dictionaries(
        {**warm, "total_num_steps": st.integers(1, 30)}, optional={"warmup_min_lr": rates, "warmup_max_lr": rates}
    ),
    "WarmupCosineLR": st.fixed_dictionaries(
        {**warm, "total_num_steps": st.integers(1, 30)},
        optional={"warmup_min_ratio": st.floats(0, 0.5), "cos_min_ratio": st.floats(0, 0.5)},
    ),
    "OneCycle": st.fixed_dictionaries(
        {"cycle_min_lr": rates, "cycle_max_lr": rates, "cycle_first_step_size": steps},
        optional={
            "cycle_second_step_size": steps,
            "cycle_first_stair_count": st.integers(0, 4),
            "cycle_second_stair_count": st.integers(0, 4),
            "decay_step_size": st.integers(0, 5),
            "decay_lr_rate": st.floats(0, 1),
            "decay_mom_rate": st.floats(0, 0.01),
            "cycle_min_mom": st.floats(0.5, 0.8),
            "cycle_max_mom": st.floats(0.8, 0.9),
            "cycle_momentum": st.booleans(),
        },
    ),
    "LRRangeTest": st.fixed_dictionaries(
        {"lr_range_test_min_lr": rates, "lr_range_test_step_size": steps},
        optional={"lr_range_test_step_rate": st.floats(0.1, 3), "lr_range_test_staircase": st.booleans()},
    ),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_equals_deepspeed(kind):
    from deepspeed.runtime import lr_schedules

    @settings(deadline=None, max_examples=60)
    @given(params=PARAMS[kind], base=rates)
    def check(params, base):
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=base)
        theirs = getattr(lr_schedules, kind)(optimizer, **params)
        ours = schedule_of({"type": "AdamW", "params": {"lr": base}}, {"type": kind, "params": params})
        for step in range(40):
            group = optimizer.param_groups[0]
            update = ours(step)
            assert update.learning_rate == pytest.approx(group["lr"], rel=1e-6, abs=1e-12), step
            if update.betas is not None:
                assert update.betas == pytest.approx(group["betas"], rel=1e-6), step
            theirs.step()

    check()


def test_without_a_scheduler_the_rate_stays():
    schedule = schedule_of({"type": "AdamW", "params": {"lr": 0.25}}, None)
    assert {schedule(step).learning_rate for step in (0, 7, 10**6)} == {0.25}
