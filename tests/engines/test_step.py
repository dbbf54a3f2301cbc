"""The step that all engines share: what a rank waits for, and when."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.training import LLAMA, Case


def begun_alone(case: Case, reached: Path) -> bool:
    """Let rank 1 come late to a step; return on it whether rank 0 has computed by then."""
    import torch.distributed as dist

    from tests.support.training import build, collated, data_rank_of, shares, spec_of, task_of
    from trainer.optim.lr_schedules import Update

    rank = dist.get_rank()
    engine, task = build(case, rank), task_of(spec_of(LLAMA), case)
    batches = [collated(task, share) for share in shares(case, 0, data_rank_of(case, rank))]
    [model] = engine.modules
    model.model.model.layers[-1].register_forward_hook(lambda *_: reached.touch())
    if rank == 1:
        deadline = time.monotonic() + 30
        while not reached.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    alone = reached.exists()
    engine.step(0, batches, Update(1e-2))
    engine.close()
    return alone


@pytest.mark.parametrize("engine", ["mesh", "accelerate", "deepspeed"])
def test_a_forward_pass_waits_for_no_other_rank(pools, tmp_path, engine):
    """The number of targets of all ranks is awaited before the backward pass."""
    case = Case(engine=engine, world_size=2, zero_stage=0, model=LLAMA)
    assert pools[2].run(begun_alone, case=case, reached=tmp_path / "reached")[1]
