"""The ranks of each reduction; a new axis needs an entry in the table alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.probing import layout
from tests.support.training import LLAMA, TRAIN_BATCH, samples, spec_of, task_of

CPU = torch.device("cpu")


def members(sizes: dict[str, int]) -> dict[str, list[int]]:
    """Return this rank's group in each reduction. Runs on each rank."""
    import torch.distributed as dist

    from trainer.parallel.parallel_mesh import parallel_mesh_of

    mesh = parallel_mesh_of(layout(**sizes), CPU)
    results = {}
    for reduction, group in mesh.groups.items():
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        assert len(ranks) == mesh.size(reduction)
        one = mesh.sum(torch.ones(()), reduction)
        assert float(one) == len(ranks)
        results[reduction] = ranks
    return results


HSDP = {
    "replicate": 2,
    "shard": 2,
    "accumulation": 1,
    "zero_stage": 3,
}


@pytest.mark.parametrize(
    ("sizes", "of_rank_3"),
    [
        (
            HSDP,
            {
                "batch": [0, 1, 2, 3],
                "loss": [0, 1, 2, 3],
                "shard": [2, 3],
                "replica": [1, 3],
                "norm": [2, 3],
            },
        ),
        (
            {"pipeline": 2, "tensor": 2},
            {"batch": [3], "loss": [1, 3], "shard": [3], "replica": [3], "norm": [0, 1, 2, 3]},
        ),
        (
            {"tensor": 2, "replicate": 2, "accumulation": 1},
            {"batch": [1, 3], "loss": [1, 3], "shard": [3], "replica": [1, 3], "norm": [2, 3]},
        ),
    ],
    ids=["HSDP", "pipeline x tensor", "tensor x DDP"],
)
def test_the_ranks_that_reduce_together(pools, sizes, of_rank_3):
    assert pools[4].run(members, sizes=sizes)[3] == of_rank_3


AXES = ("pipeline", "replicate", "shard", "tensor", "context")


def with_a_context_axis(entry: bool) -> list[float]:
    """Cut rows along an axis that the trainer lacks: [loss, targets, scale]. Runs on each rank."""
    from torch.distributed.device_mesh import init_device_mesh

    from trainer.engines.normalise import NormalisedEngine, counted_here, gradient_scale
    from trainer.parallel import parallel_mesh as module

    reductions = {
        **module.REDUCTIONS,
        **({"loss": (*module.REDUCTIONS["loss"], "context")} if entry else {}),
    }
    with mock.patch.object(module, "REDUCTIONS", reductions):
        devices = init_device_mesh("cpu", (1, 2, 1, 1, 2), mesh_dim_names=AXES)
        mesh = module.ParallelMesh(
            replace(layout(), replicate=2),
            devices,
            module.groups_of(devices),
        )
        task = task_of(spec_of(LLAMA))
        rank, half = devices.get_local_rank("replicate"), devices.get_local_rank("context")
        share = TRAIN_BATCH // 2
        batch = task.collate(samples(0)[rank * share : (rank + 1) * share])
        batch = {name: batch[name].chunk(2, 1)[half] for name in ("input_ids", "targets")}
        targets = mesh.sum(counted_here(task, [batch], mesh), "loss")
        runner = SimpleNamespace(evaluate=lambda batches: summed(batches)[None])
        engine: Any = SimpleNamespace(job=SimpleNamespace(task=task), _mesh=mesh, _runner=runner)
        loss, counted = NormalisedEngine.evaluate(engine, [batch])
        return [float(loss), float(counted), float(targets), float(gradient_scale(targets, mesh))]


def summed(batches: list[dict[str, Any]]) -> torch.Tensor:
    """Sum a loss that is each position's token plus one."""
    return (
        torch.stack([((b["input_ids"] + 1) * (b["targets"] != -100)).sum() for b in batches])
        .sum()
        .float()
    )


def test_a_new_axis_is_one_entry_in_the_table(pools):
    batch = task_of(spec_of(LLAMA)).collate(samples(0))
    loss, targets = float(summed([batch])), int((batch["targets"] != -100).sum())
    for result in pools[4].run(with_a_context_axis, entry=True):
        assert result == [loss, targets, targets, pytest.approx(2 / targets)]
    assert any(
        result[:2] != [loss, targets] for result in pools[4].run(with_a_context_axis, entry=False)
    )
