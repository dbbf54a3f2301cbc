"""A step whose gradient is not finite changes nothing on any rank, is told, and after three in a row ends the run."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands import ROOT, run, write_job
from tests.training import LLAMA, Case, build, data_rank_of, shares, task_of, whole_weights
from trainer.engines.engine import Metrics
from trainer.errors import NumericsError
from trainer.numerics import Skipped
from trainer.ranks import Ranks

STILL = LLAMA | {"attention_dropout": 0.0}
MESH = Case("mesh", zero_stage=0)
SGD = {"type": "SGD", "params": {"lr": 1e-2}}
CASES = {
    **{f"deepspeed ZeRO-{stage}": Case(zero_stage=stage) for stage in (0, 1, 2, 3)},
    "deepspeed ZeRO-2, bfloat16": Case(zero_stage=2, precision="bfloat16"),
    "mesh DDP": MESH,
    "mesh ZeRO-3": replace(MESH, zero_stage=3),
    "mesh ZeRO-2, SGD": replace(MESH, zero_stage=2, optimizer=SGD),
    "accelerate ZeRO-3": replace(MESH, zero_stage=3, engine="accelerate"),
    "deepspeed 2-way tensor, ZeRO-0": Case(zero_stage=0, tensor=2, model=STILL),
    "deepspeed 2-way tensor, ZeRO-2": Case(zero_stage=2, tensor=2, model=STILL),
    **{
        f"{engine} pipeline, {precision}, ZeRO-{stage}": Case(
            engine, pipeline=2, zero_stage=stage, precision=precision, model=LLAMA | {"num_hidden_layers": 4}
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
    """Three steps, the second of them poisoned on the last rank alone. Runs on each rank.

    Which steps changed a weight, the losses, whether all is finite at the end, and the optimizer's step counts.
    """
    import torch.distributed as dist

    from trainer.optimizers import Update
    from trainer.tasks import cross_entropy

    rank = dist.get_rank()
    engine, task = build(case, rank), task_of(build_spec(case))
    real, bad = cross_entropy.linear_cross_entropy, [False]

    def loss(*arguments: Any) -> torch.Tensor:
        value = real(*arguments)
        if not bad[0] or rank + 1 < case.world_size:
            return value
        return value * float("nan") if kind == "loss" else Infinite.apply(value)

    changed, losses, counts = [], [], []
    before = whole_weights(engine, case)

    cross_entropy.linear_cross_entropy = loss
    try:
        for step in range(3):
            bad[0] = step == 1
            batches = [task.collate(share) for share in shares(case, step, data_rank_of(case, rank))]
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
    from tests.training import spec_of

    return spec_of(case.model)


class Infinite(torch.autograd.Function):
    """A finite loss with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(pools, name, kind):
    case = CASES[name]
    for changed, losses, finite, counts in pools[2].run(poisoned, case=case, kind=kind):
        assert changed == [True, False, True]
        assert finite
        assert np.isfinite(losses[1]) == (kind == "gradient") and np.isfinite(losses[2])
        assert case.optimizer is SGD or counts == [1, 1, 2]


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
        skipped.seen(batches, metrics)
    return skipped.lines(), skipped.total


def test_what_is_told_of_it():
    nan, inf = float("nan"), float("inf")
    assert told(True, 1.0, nan, 1.0, inf, inf, 1.0) == (
        [
            "step 2 skipped: its gradient is not finite (samples 2, 3)",
            "step 4 skipped: its gradient is not finite (samples 6, 7)",
            "step 5 skipped: its gradient is not finite (samples 8, 9)",
        ],
        3,
    )
    assert told(False, nan, nan, nan, nan) == ([], 0)
    with pytest.raises(NumericsError) as caught:
        told(True, 1.0, nan, nan, nan)
    assert caught.value.exit_code == 76 and caught.value.shared
    assert str(caught.value) == (
        "steps 2 to 4: no finite gradient 3 times in a row; expected a finite gradient. "
        "Lower the learning rate, or look at the last samples (6, 7); the last checkpoint is good"
    )


def test_a_row_is_counted_over_log_lines():
    skipped = Skipped(Ranks(), watching=True)
    bad = steps(*[float("nan")] * 3)
    for batches, metrics in bad[:2]:
        skipped.seen(batches, metrics)
        assert len(skipped.lines()) == 1
    skipped.seen(*bad[2])
    with pytest.raises(NumericsError):
        skipped.lines()


def test_a_run_that_goes_wrong_ends_with_76_and_keeps_its_checkpoint(tmp_path):
    """Two ranks; from step 5 on the loss of rank 1 is not a number."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from trainer.tasks.task import Trainee\n"
        "real, calls = Trainee.forward, [0]\n"
        "def forward(self, batch):\n"
        "    calls[0] += self.training\n"
        "    return real(self, batch) * (float('nan') if os.environ['RANK'] == '1' and calls[0] > 8 else 1)\n"
        "Trainee.forward = forward\n"
        f"sys.argv[0] = {str(ROOT / 'launch' / 'train.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    job = write_job(tmp_path, steps=12, log={"every": 2}, checkpoint={"every": 4})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = run(*launcher, script, "--config", job)
    assert "step 5 skipped: its gradient is not finite (samples " in result.output
    assert "steps 5 to 7: no finite gradient 3 times in a row" in result.output
    assert [path.name for path in (tmp_path / "runs" / "job" / "checkpoints").iterdir() if path.is_dir()] == [
        "step-000004"
    ]
    assert not (tmp_path / "runs" / "job" / "final").exists()
