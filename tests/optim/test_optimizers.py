"""Our schedules against DeepSpeed's own classes, update by update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import RuntimeFacts, load, resolve
from trainer.optim import patches
from trainer.optim.lr_schedules import schedule_of
from trainer.optim.on_shards import on_shards
from trainer.optim.optimizer import scaling_in_kernel

rates = st.floats(1e-6, 1e-1)
steps = st.integers(1, 12)
warm = {"warmup_num_steps": steps, "warmup_type": st.sampled_from(["log", "linear"])}
PARAMS = {
    "WarmupLR": st.fixed_dictionaries(
        warm, optional={"warmup_min_lr": rates, "warmup_max_lr": rates}
    ),
    "WarmupDecayLR": st.fixed_dictionaries(
        {**warm, "total_num_steps": st.integers(1, 30)},
        optional={"warmup_min_lr": rates, "warmup_max_lr": rates},
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
        optional={
            "lr_range_test_step_rate": st.floats(0.1, 3),
            "lr_range_test_staircase": st.booleans(),
        },
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
        ours = schedule_of(
            {"optimizer": {"params": {"lr": base}}, "scheduler": {"type": kind, "params": params}}
        )
        for step in range(40):
            group = optimizer.param_groups[0]
            update = ours(step)
            assert update.learning_rate == pytest.approx(group["lr"], rel=1e-6, abs=1e-12), step
            if update.betas is not None:
                assert update.betas == pytest.approx(group["betas"], rel=1e-6), step
            theirs.step()

    check()


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 12), (1, 12), (5, 12), (12, 12), (3, 1)])
def test_equals_transformers(kind, warmup, total):
    """DeepSpeed's are an update late: here step 0 of a run without warm-up has the whole rate."""
    from transformers import get_scheduler

    for least in (0.0, 0.1) if kind == "cosine" else (0.0,):
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.5)
        name, more = ("cosine_with_min_lr", {"min_lr_rate": least}) if least else (kind, None)
        theirs = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=more)
        params = {"warmup_num_steps": warmup} | (
            {} if kind == "constant_with_warmup" else {"total_num_steps": total}
        )
        params |= {"cos_min_ratio": least} if least else {}
        ours = schedule_of(
            {"optimizer": {"params": {"lr": 0.5}}, "scheduler": {"type": kind, "params": params}}
        )
        for step in range(max(total, warmup)):
            assert ours(step).learning_rate == pytest.approx(
                optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-12
            ), step
            optimizer.step()
            theirs.step()


def test_the_certificate_knows_transformers_schedules_and_finds_one_that_is_late(monkeypatch):
    """The names of transformers have its rates, not those of DeepSpeed."""
    from trainer.certify.comparisons.runs import compare_schedule
    from trainer.optim import lr_schedules

    for kind, total in (("linear", 20), ("cosine", 20), ("constant_with_warmup", None)):
        params = {"warmup_num_steps": 4} | ({"total_num_steps": total} if total else {})
        params |= {"cos_min_ratio": 0.1} if kind == "cosine" else {}
        given = {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "scheduler": {"type": kind, "params": params},
        }
        config = resolve(load({"trainer": {}, **given}), RuntimeFacts(1, 8, 20, False, "cpu"))
        assert compare_schedule(config, 20).passed
        own = lr_schedules.SCHEDULES[kind]
        late = lambda base, own=own, **params: lambda step: own(base, **params)(max(0, step - 1))  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setitem(lr_schedules.SCHEDULES, kind, late)
            assert not compare_schedule(config, 20).passed


def test_no_warm_up_is_none_under_transformers_names_and_a_step_under_deepspeeds():
    steps = {}
    for kind in ("linear", "WarmupDecayLR"):
        params = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
        config = load({"scheduler": {"type": kind, "params": params}, "trainer": {"steps": 9}})
        steps[kind] = resolve(config, RuntimeFacts(1, 8, 9, False, "cpu")).scheduler.params[
            "warmup_num_steps"
        ]
    assert steps == {"linear": 0, "WarmupDecayLR": 1}


def test_without_a_scheduler_the_rate_stays():
    schedule = schedule_of({"optimizer": {"params": {"lr": 0.25}}})
    assert {schedule(step).learning_rate for step in (0, 7, 10**6)} == {0.25}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("patched", [False, True])
def test_a_fused_kernel_skips_a_step_that_is_not_finite_by_its_flag_alone(kind, patched):
    """The symptom for which `trainer/optim/patches.py` is there."""
    weight = torch.ones(3)
    weight.grad = torch.full((3,), float("nan"))
    optimizer = kind([weight], fused=True)
    if patched:
        patches.set_found_inf(optimizer, torch.ones(()))
    optimizer.step()
    assert bool(weight.isfinite().all()) == patched


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_a_fused_kernel_scales_gradients_as_clipping_does(kind):
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    factor = torch.tensor(0.25)
    for weight, scale in ((first, 1.0), (second, factor)):
        params = {"lr": 0.1, "weight_decay": 0.01, "fused": True}
        optimizer = on_shards(f"torch.optim.{kind}", params)([weight], **params)
        for step in range(3):
            weight.grad = torch.tensor([1.0, -2.0, 3.0]) * (step + 1) * scale
            if weight is first:
                scaling_in_kernel(optimizer)([weight.grad], factor)
            optimizer.step()
    torch.testing.assert_close(first, second)
    assert scaling_in_kernel(torch.optim.AdamW([first], foreach=True)) is None
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    kernel = on_shards("torch.optim.AdamW", {})([half], **{"fused": True})
    assert scaling_in_kernel(kernel) is None
