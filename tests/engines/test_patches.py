"""Libraries show the symptoms for which they are patched: a patch whose test fails can go."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.layouts import SPREAD
from tests.support.training import (
    Case,
    Outcome,
    assert_same,
    layout_of,
    train_by_engine,
    train_plainly,
)
from trainer.engines.deepspeed import patches
from trainer.engines.deepspeed.engine import KIND


def stepped(
    stage: int, gradient: float, patch: Callable[[Any], object], bf16: bool = False
) -> tuple[bool, bool]:
    """Take a step of plain DeepSpeed; return if weights are finite, and if group 2 has state."""
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model = model.to(torch.bfloat16) if bf16 else model
    first, second = model.parameters()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **({"bf16": {"enabled": True, "check_grad_overflow": False}} if bf16 else {}),
    }
    groups = [{"params": [first]}, {"params": [second]}]
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=groups, dist_init_required=False
    )
    patch(engine.optimizer)
    try:
        engine.backward(
            engine(torch.ones(1, 4, dtype=next(model.parameters()).dtype)).sum() * gradient
        )
        engine.step()
        try:
            linked = safe_get_full_optimizer_state(second, "exp_avg") is not None
        except (TypeError, ValueError):  # it has no state
            linked = False
        return all(bool(p.isfinite().all()) for p in model.parameters()), linked
    finally:
        engine.destroy()


def left_by_an_engine() -> tuple[bool, bool]:
    """Return if a destroyed ZeRO-3 engine leaves PyTorch's linear function, and no groups."""
    import deepspeed
    from deepspeed.utils import groups

    try:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 3},
        }
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Linear(4, 4)
        engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        engine.destroy()
        left = torch.nn.functional.linear is torch._C._nn.linear
    finally:
        patches.forget_earlier_engines()
    return left, torch.nn.functional.linear is torch._C._nn.linear and groups.mpu is None


def replaced(optimizer: Any) -> None:
    patches.replace_step(optimizer, lambda update: None)


def nothing(optimizer: Any) -> None: ...


def test_deepspeed_leaves_its_linear_function(pools: Any) -> None:
    assert pools[1].run(left_by_an_engine) == [(False, True)]


@pytest.mark.parametrize(
    ("stage", "bf16", "patch"),
    [(0, False, replaced), (2, True, patches.skip_steps_that_are_not_finite)],
    ids=["stage 0", "stage 2, unchecked"],
)
def test_deepspeed_takes_a_step_that_is_not_finite(
    pools: Any, stage: int, bf16: bool, patch: Any
) -> None:
    for used, finite in ((nothing, False), (patch, True)):
        assert (
            pools[1].run(stepped, stage=stage, gradient=math.inf, patch=used, bf16=bf16)[0][0]
            == finite
        )


def test_deepspeed_links_state_after_the_first_group_alone(pools: Any) -> None:
    for used, linked in ((nothing, False), (patches.link_group_by_group, True)):
        assert pools[1].run(stepped, stage=1, gradient=1.0, patch=used)[0][1] == linked


def trained_without(patch: str, case: Case) -> Outcome:
    with mock.patch.object(patches, patch, lambda *_: nullcontext()):
        return train_by_engine(case)


@pytest.mark.skipif(
    KIND.refusal(layout_of(SPREAD)) is not None, reason="older versions spread no experts"
)
@pytest.mark.parametrize("patch", ["mark_experts", "has_expert_layer"])
def test_deepspeed_takes_the_experts_of_ranks_for_copies(pools: Any, patch: str) -> None:
    case = replace(SPREAD, engine="deepspeed")
    with pytest.raises(AssertionError):
        [outcome, _] = pools[2].run(trained_without, patch=patch, case=case)
        assert_same(outcome, train_plainly(case), 1e-2)


def test_deepspeed_compiles_at_its_start_what_only_inference_calls() -> None:
    comm = import_module("deepspeed.comm.torch")

    class Builder:
        NAME = "deepspeed_shm_comm"
        load = mock.Mock()
        absolute_name = mock.Mock()

    known = {Builder.NAME: True}
    accelerator = SimpleNamespace(create_op_builder=lambda name: Builder())
    with (
        mock.patch.dict("deepspeed.ops.__compatible_ops__", known),
        mock.patch.object(comm, "get_accelerator", lambda: accelerator),
    ):
        comm.build_shm_op()
        assert Builder.load.call_count == 1
        patches.leave_out_sums_in_shared_memory()
        assert comm.build_shm_op() is None
        assert Builder.load.call_count == 1


def test_deepspeeds_pipeline_has_no_hook_before_its_update() -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    source = inspect.getsource(PipelineEngine._exec_optimizer_step)
    assert "_take_model_step(lr_kwargs)" in source
    assert "hook" not in source


def test_deepspeeds_loss_scaler_loads_no_state() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    assert not hasattr(DynamicLossScaler, "load_state_dict")
    scaler = DynamicLossScaler(2**16, 1000, 1.0, 1, False)
    patches.set_loss_scaler(scaler, {"cur_scale": 8.0, "cur_iter": 3.0})
    assert (scaler.loss_scale, scaler.cur_iter) == (8.0, 3)


def test_deepspeed_ties_only_layers_that_it_builds() -> None:
    from deepspeed.pipe import PipelineModule

    built = SimpleNamespace(tied_comms={})
    assert PipelineModule.get_tied_weights_and_groups(built) == []
    assert "grad_accum" not in inspect.getsource(PipelineModule.allreduce_tied_weight_gradients)


def test_deepspeed_sends_a_model_that_all_ranks_have() -> None:
    from deepspeed.runtime.zero.partition_parameters import Init

    assert "dist.broadcast(" in inspect.getsource(Init._zero_init_param)
