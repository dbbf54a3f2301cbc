"""A step whose gradient is not finite changes nothing on any rank, is told, and after three in a
row ends the run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.support.commands import ROOT, run, write_job
from tests.support.messages import shows, shows_each
from tests.support.training import LLAMA, Case, build, data_rank_of, shares, task_of, whole_weights
from trainer.distributed.ranks import Ranks
from trainer.engines.engine import Metrics
from trainer.errors import NumericsError
from trainer.optim.optimizer import step_if_finite
from trainer.run.observers.metrics import Skipped

STILL = LLAMA | {"attention_dropout": 0.0}
MESH = Case("mesh", zero_stage=0)
SGD = {"type": "SGD", "params": {"lr": 1e-2, "weight_decay": 0.0}}
CASES = {
    **{f"deepspeed ZeRO-{stage}": Case(zero_stage=stage) for stage in (0, 1, 2, 3)},
    "deepspeed ZeRO-2, bfloat16": Case(zero_stage=2, precision="bfloat16"),
    "mesh DDP": MESH,
    "mesh ZeRO-3": replace(MESH, zero_stage=3),
    "mesh ZeRO-2, SGD": replace(MESH, zero_stage=2, optimizer=SGD),
    "accelerate ZeRO-3": replace(MESH, zero_stage=3, engine="accelerate"),
    "deepspeed ZeRO-0, SGD": Case(
        zero_stage=0, optimizer=SGD | {"params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0}}
    ),
    "deepspeed ZeRO-0, Adagrad": Case(
        zero_stage=0, optimizer={"type": "Adagrad", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    ),
    "deepspeed ZeRO-0, RAdam": Case(
        zero_stage=0, optimizer={"type": "RAdam", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    ),
    "deepspeed 2-way tensor, ZeRO-0": Case(zero_stage=0, tensor=2, model=STILL),
    "deepspeed 2-way tensor, ZeRO-2": Case(zero_stage=2, tensor=2, model=STILL),
    **{
        f"{engine} pipeline, {precision}, ZeRO-{stage}": Case(
            engine,
            pipeline=2,
            zero_stage=stage,
            precision=precision,
            model=LLAMA | {"num_hidden_layers": 4},
        )
        for engine, precision, stage in (
            ("mesh", "float32", 0),
            ("deepspeed", "float32", 0),
            ("deepspeed", "float32", 1),
            ("deepspeed", "bfloat16", 1),
        )
    },
}


def poisoned(case: Case, kind: str) -> tuple[list[bool], list[float], bool, list[float]]:
    """Three steps, the second of them poisoned on the last data rank alone. Runs on each rank.

    Which steps changed a weight, the losses, whether all is finite at the end, and the optimizer's
    step counts.
    """
    import torch.distributed as dist

    from trainer.optim.lr_schedules import Update
    from trainer.tasks.losses import cross_entropy

    rank = dist.get_rank()
    engine, task = build(case, rank), task_of(build_spec(case))
    real, bad = cross_entropy.linear_cross_entropy, [False]

    def loss(*arguments: Any) -> torch.Tensor:
        value = real(*arguments)
        if not bad[0] or data_rank_of(case, rank) + 1 < case.data_ranks:
            return value
        return value * float("nan") if kind == "loss" else Infinite.apply(value)

    changed, losses, counts = [], [], []
    before = whole_weights(engine, case)

    cross_entropy.linear_cross_entropy = loss
    try:
        for step in range(3):
            bad[0] = step == 1
            batches = [
                task.collate(share) for share in shares(case, step, data_rank_of(case, rank))
            ]
            metrics = engine.step(step, batches, Update(1e-2))
            losses.append(float(metrics.loss()))
            after = whole_weights(engine, case)
            changed.append(any(not torch.equal(before[name], after[name]) for name in before))
            counts.append(engine.scalars()["optimizer_step"])
            before = after
    finally:
        cross_entropy.linear_cross_entropy = real
    engine.close()
    return changed, losses, all(bool(value.isfinite().all()) for value in before.values()), counts


def build_spec(case: Case) -> Any:
    from tests.support.training import spec_of

    return spec_of(case.model)


class Infinite(torch.autograd.Function):
    """A finite loss with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


@pytest.mark.first(
    "deepspeed ZeRO-2-gradient",
    "mesh ZeRO-3-loss",
    "accelerate ZeRO-3-gradient",
    "deepspeed ZeRO-0, RAdam-gradient",
)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(pools, name, kind):
    case = CASES[name]
    for changed, losses, finite, counts in pools[2].run(poisoned, case=case, kind=kind):
        assert changed == [True, False, True]
        assert finite
        assert np.isfinite(losses[1]) == (kind == "gradient") and np.isfinite(losses[2])
        assert case.optimizer["type"] == "SGD" or counts == [1, 1, 2]


@pytest.mark.first("True-AdamW")
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad]
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_is_not_finite_leaves_nothing_behind(kind, fused):
    weights = [torch.ones(3), torch.ones(3)]
    optimizers = [kind([weight], lr=0.1, fused=fused) for weight in weights]
    for weight, optimizer, norms in zip(
        weights, optimizers, ([float("nan"), 1.0], [1.0]), strict=True
    ):
        for norm in norms:
            weight.grad = torch.full((3,), norm)
            step_if_finite(optimizer, torch.tensor(norm))
    assert torch.equal(*weights)
    for mine, theirs in zip(
        *(optimizer.state[w].values() for w, optimizer in zip(weights, optimizers, strict=True)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def device_of_the_flag() -> str:
    optimizer = torch.optim.AdamW([torch.ones(2)], fused=True)
    actual = []
    optimizer.step = lambda: actual.append(str(optimizer.found_inf.device))
    with FakeTensorMode(allow_non_fake_inputs=True):
        step_if_finite(optimizer, torch.ones((), device="cuda"))
    [device] = actual
    return device


def test_a_kernel_on_the_host_has_its_flag_before_it_starts(pools):
    """With offload the norm is on the device and fused Adam on the host, which copies the flag
    without a wait.

    A fake tensor on a GPU gives PyTorch a device, whose autograd then starts threads: a process
    that simulates a rank could no longer be forked from this one.
    """
    assert pools[1].run(device_of_the_flag) == ["cpu"]


def steps(*norms: float) -> list[tuple[Any, Metrics]]:
    return [
        (
            SimpleNamespace(step=step, ids=[np.array([2 * step, 2 * step + 1])], micro_batches=[]),
            Metrics(torch.tensor(1.0), torch.tensor(1), torch.tensor(norm)),
        )
        for step, norm in enumerate(norms)
    ]


def told(watching: bool, *norms: float) -> tuple[list[str], int]:
    skipped = Skipped(Ranks(), watching)
    for batches, metrics in steps(*norms):
        skipped.note(batches, metrics)
    return skipped.lines(), skipped.total


def test_what_is_told_of_it():
    nan, inf = float("nan"), float("inf")
    lines, total = told(True, 1.0, nan, 1.0, inf, inf, 1.0)
    assert total == 3
    shows_each(
        lines,
        ("step 2 skipped", "not finite", "samples 2, 3"),
        ("step 4 skipped", "not finite", "samples 6, 7"),
        ("step 5 skipped", "not finite", "samples 8, 9"),
    )
    assert told(False, nan, nan, nan, nan) == ([], 0)
    with pytest.raises(NumericsError) as caught:
        told(True, 1.0, nan, nan, nan)
    assert caught.value.exit_code == 76 and caught.value.shared
    shows(caught.value, "2 to 4", "3 times", "Lower", "(6, 7)")


@pytest.mark.more
def test_a_run_whose_norm_nobody_wants(tmp_path):
    job = write_job(tmp_path, steps=2, log={"every": 1})
    more = (
        "zero_optimization.compute_grad_norm=false",
        "gradient_clipping=0",
        "zero_optimization.stage=1",
    )
    result = run(sys.executable, ROOT / "launch" / "train.py", "--config", job, *more)
    assert result.code == 0 and "step 2/2 | loss" in result.output and "|g|" in result.output, (
        result.output
    )


def test_a_row_is_counted_over_log_lines():
    skipped = Skipped(Ranks(), watching=True)
    bad = steps(*[float("nan")] * 3)
    for batches, metrics in bad[:2]:
        skipped.note(batches, metrics)
        assert len(skipped.lines()) == 1
    skipped.note(*bad[2])
    with pytest.raises(NumericsError):
        skipped.lines()


@pytest.mark.more
def test_a_run_that_goes_wrong_ends_with_76_and_keeps_its_checkpoint(tmp_path):
    """Two ranks; from step 5 on the loss of rank 1 is not a number."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from trainer.tasks.task import ModelWithLoss\n"
        "real, calls = ModelWithLoss.forward, [0]\n"
        "def forward(self, batch):\n"
        "    calls[0] += self.training\n"
        "    return real(self, batch) * (float('nan') if os.environ['RANK'] == '1' and calls[0] > "
        "8 else 1)\n"
        "ModelWithLoss.forward = forward\n"
        f"sys.argv[0] = {str(ROOT / 'launch' / 'train.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    job = write_job(tmp_path, steps=12, log={"every": 2}, checkpoint={"every": 4})
    launcher = ["torchrun", "--nproc-per-node", "2"]
    result = run(*launcher, script, "--config", job)
    shows(result.output, "5 skipped", "finite (samples")
    shows(result.output, "5 to 7", "finite gradient 3 times")
    assert [
        path.name for path in (tmp_path / "runs" / "job" / "checkpoints").iterdir() if path.is_dir()
    ] == ["step-000004"]
    assert not (tmp_path / "runs" / "job" / "final").exists()
