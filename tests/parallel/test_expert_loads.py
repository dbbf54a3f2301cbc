"""Biases that balance experts follow the loads of a whole step, to the bit, in every layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.layouts import HOST, PARTS, by_engine
from tests.support.parallel.balanced import ERNIE, GLM, MINIMAX, ONE
from tests.support.training import (
    Case,
    assert_same,
    build,
    collated,
    data_rank_of,
    layout_of,
    resume_by_engine,
    shares,
    spec_in,
    task_of,
    train_by_engine,
    train_plainly,
)
from trainer.optim.lr_schedules import Update
from trainer.parallel.splits import expert_loads
from trainer.parallel.splits.expert_loads import ExpertLoads

GLM_4 = GLM | {"num_hidden_layers": 4}
TWO = replace(ONE, world_size=2)
FOUR = replace(ONE, world_size=4, micro_batch=1)
LAYOUTS = {
    "one rank": ONE,
    "one rank, ernie": replace(ONE, model=ERNIE),
    "ddp": replace(TWO, zero_stage=0),
    "ddp, full": replace(TWO, zero_stage=0, recompute="full"),
    "zero1": replace(TWO, zero_stage=1),
    "zero2, every 2": replace(TWO, recompute="every", every=2),
    "zero2, minimax": replace(TWO, model=MINIMAX),
    "zero3, ernie, selective": replace(TWO, zero_stage=3, model=ERNIE, recompute="selective"),
    "zero3, offload": replace(TWO, zero_stage=3, recompute="offload"),
    "zero3, all on the host": replace(TWO, zero_stage=3, **HOST),
    "hsdp, zero3": replace(FOUR, replicate=2, zero_stage=3),
    "pipeline": replace(TWO, pipeline=2, zero_stage=0, model=GLM_4),
    "pipeline, ZBVZeroBubble, full": replace(
        TWO, pipeline=2, zero_stage=0, schedule="ZBVZeroBubble", model=GLM_4, recompute="full"
    ),
    "pipeline x zero1": replace(FOUR, pipeline=2, zero_stage=1, model=GLM_4),
    "pipeline x zero3": replace(FOUR, pipeline=2, zero_stage=3, model=GLM_4),
    "tensor": replace(TWO, tensor=2, zero_stage=0),
    "tensor x zero2, sequence": replace(FOUR, tensor=2, more=PARTS),
    "tensor x zero3, sequence, full": replace(
        FOUR, tensor=2, more=PARTS, zero_stage=3, recompute="full"
    ),
    "context": replace(TWO, context=2),
    "context x zero3, full": replace(FOUR, context=2, zero_stage=3, recompute="full"),
    "experts": replace(TWO, expert=2),
    "experts over four, full": replace(FOUR, expert=4, zero_stage=3, recompute="full"),
    "experts, compiled": replace(TWO, expert=2, compile="blocks"),
    "tensor x experts": replace(FOUR, tensor=2, expert=2),
    "tensor x experts, sequence": replace(FOUR, tensor=2, expert=4, more=PARTS),
    "context x experts": replace(FOUR, context=2, expert=2, zero_stage=3),
    "pipeline x experts": replace(FOUR, pipeline=2, expert=2, model=GLM_4),
    "pipeline x tensor, sequence": replace(
        FOUR, pipeline=2, tensor=2, zero_stage=0, model=GLM_4, more=PARTS
    ),
    "compiled": replace(TWO, zero_stage=3, compile="blocks"),
    "compiled, selective": replace(TWO, zero_stage=3, compile="blocks", recompute="selective"),
}
CASES = {
    name: case
    for name, case in sorted(by_engine(LAYOUTS).items(), key=lambda pair: pair[1].world_size)
    if case.engine != "deepspeed" or case.tensor == 1  # AutoTP does not split experts
}
RESUMED = ("zero3, ernie, selective", "pipeline x zero3", "experts over four, full", "zero1")


@pytest.mark.first("mesh-one rank", "mesh-tensor x zero2, sequence")
@pytest.mark.parametrize("name", CASES)
def test_biases_move_as_in_one_process(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    biases = {key: value for key, value in reference.weights.items() if key.endswith("_bias")}
    assert biases and all(bool((value != 0).any()) for value in biases.values())
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)
        for key, value in biases.items():
            assert outcome.weights[key].tolist() == value.tolist(), key


@pytest.mark.first("mesh-zero3, ernie, selective")
@pytest.mark.parametrize("name", [name for name in CASES if name.partition("-")[2] in RESUMED])
def test_a_resumed_run_moves_on_from_the_same_biases(pools, tmp_path, name):
    case = CASES[name]
    given = {"before": case, "after": case, "folder": tmp_path}
    for losses, weights in pools[case.world_size].run(resume_by_engine, **given):
        assert losses[0] == losses[1]
        assert any(key.endswith("_bias") for key in weights[0])
        assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def moved_by_low_precision(case: Case) -> dict[str, list[float]]:
    """Return the steps up or down of each bias from 1, by its name, after three steps."""
    engine = build(case, dist.get_rank())
    task = task_of(spec_in(case))
    buffers = {k: b for m in engine.modules for k, b in m.named_buffers() if k.endswith("_bias")}
    for bias in buffers.values():
        bias.fill_(1.0)
    for step in range(3):
        shared = shares(case, step, data_rank_of(case, dist.get_rank()))
        engine.step(step, [collated(task, share) for share in shared], Update(1e-2))
    moved = {key: ((bias - 1) / case.router_bias_rate).tolist() for key, bias in buffers.items()}
    engine.close()
    return moved


@pytest.mark.first("mesh-parameter")
@pytest.mark.parametrize("model", [GLM, ERNIE], ids=["buffer", "parameter"])
@pytest.mark.parametrize("engine", ["mesh", "deepspeed"])
def test_in_bfloat16_a_bias_of_one_moves_by_a_thousandth(pools, engine, model):
    low = {"engine": engine, "precision": "bfloat16", "zero_stage": 3, "model": model}
    case = replace(TWO, router_bias_rate=1e-3, **low)
    first, second = pools[2].run(moved_by_low_precision, case=case)
    assert first and first == second
    for steps in first.values():
        assert all(abs(n - round(n)) < 1e-3 for n in torch.tensor(steps).flatten().tolist())
        assert torch.tensor(steps).round().abs().max() > 0


def test_a_step_that_is_not_finite_moves_nothing():
    case = replace(ONE, engine="mesh", zero_stage=0)
    mesh: Any = SimpleNamespace(layout=layout_of(case), rank=lambda axis: 0)
    bias = torch.zeros(4)
    with mock.patch.object(expert_loads, "holders_of", lambda mesh: (None, [])):
        loads = ExpertLoads([], spec_in(case), None, mesh)
    for norm, skipped, moved in (
        (torch.tensor(torch.nan), False, 0.0),
        (torch.tensor(torch.inf), False, 0.0),
        (torch.tensor(1.0), True, 0.0),
        (torch.tensor(1.0), False, case.router_bias_rate),
    ):
        load = torch.tensor([3, 0, 1, 0])
        loads._loads = [(bias, load)]
        loads.move(norm, skipped)
        assert bias.tolist() == (moved * torch.tensor([-1.0, 1.0, 0.0, 1.0])).tolist()
        assert not load.any()
