"""Batch norm in every layout against plain PyTorch in one process over the same micro-batches:
gradients, weights, and the running statistics, which take each micro-batch up once, in the order of
the global batch.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.commands import script
from tests.support.messages import raises, shows
from tests.support.parallel.batch_norm import loss_of, network, samples
from tests.support.training import STEPS, TRAIN_BATCH, Case, data_rank_of, layout_of
from trainer.errors import ConfigError

MESH = Case(engine="mesh", clip=0.0, weight_decay_excludes="nothing")
STAGES = replace(MESH, pipeline=2, zero_stage=0, micro_batch=2)
CASES = {
    "one process": replace(MESH, world_size=1, zero_stage=0),
    "mesh DDP": replace(MESH, zero_stage=0),
    "mesh ZeRO-3, recomputed": replace(MESH, zero_stage=3, recompute="full"),
    "accelerate DDP": replace(MESH, engine="accelerate", zero_stage=0),
    "accelerate FSDP": replace(MESH, engine="accelerate", zero_stage=3),
    "deepspeed ZeRO-0": replace(MESH, engine="deepspeed", zero_stage=0),
    "deepspeed ZeRO-2": replace(MESH, engine="deepspeed", zero_stage=2),
    "deepspeed ZeRO-3, recomputed": replace(
        MESH, engine="deepspeed", zero_stage=3, recompute="every"
    ),
    "mesh pipeline": STAGES,
    "deepspeed pipeline": replace(STAGES, engine="deepspeed"),
    "mesh pipeline, folded": replace(STAGES, schedule="DualPipeV"),
    "mesh HSDP": replace(MESH, world_size=4, replicate=2, micro_batch=1, zero_stage=3),
    "mesh pipeline x ZeRO-2, recomputed": replace(
        STAGES, world_size=4, zero_stage=2, recompute="full"
    ),
}
TOGETHER = {
    name: CASES[name] for name in ("mesh DDP", "deepspeed ZeRO-2", "accelerate FSDP", "mesh HSDP")
}
TOGETHER["mesh pipeline x ZeRO-2, recomputed"] = CASES["mesh pipeline x ZeRO-2, recomputed"]


def rows(case: Case, step: int, data_rank: int) -> list[list[Any]]:
    result = samples(step)
    starts = [
        (m * case.data_ranks + data_rank) * case.micro_batch for m in range(case.accumulation)
    ]
    return [result[start : start + case.micro_batch] for start in starts]


def spec_and_task() -> tuple[Any, Any]:
    from trainer.models.own.module import spec_of
    from trainer.tasks.supervised import Supervised

    spec = spec_of(network, None, 5)
    task = Supervised(loss_of, spec.build, spec.blocks)
    return spec.tried_on(task.trial(samples(0)[:4])), task


Outcome = tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor], float]


def trained(case: Case, together: bool) -> Outcome:
    """Return losses, gradients, weights and buffers, held-out loss. Runs on each rank."""
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks
    from trainer.engines import ENGINES, Job, Machine
    from trainer.optim.lr_schedules import Update

    rank, (spec, task) = dist.get_rank(), spec_and_task()
    layout = replace(layout_of(case), sync_batch_norm=together)
    machine = Machine(torch.device("cpu"), Ranks(rank, case.world_size))
    engine = ENGINES[case.engine].build(Job(layout, spec, task, case.deepspeed(), 5, machine))
    losses, gradients = [], []
    for step in range(STEPS):
        results: dict[str, torch.Tensor] = {}
        batches = [task.collate(row) for row in rows(case, step, data_rank_of(case, rank))]
        metrics = engine.step(
            step, batches, Update(1e-2), lambda n, g, into=results: into.update({n: g.clone()})
        )
        losses.append(float(metrics.loss()))
        gradients.append(results)
    total, count = engine.evaluate(
        [task.collate(row) for row in rows(case, 99, data_rank_of(case, rank))]
    )
    weights = {}
    for entry in engine.state_tensors():
        if entry.key == "weight":
            weights[entry.name] = entry.read(engine.job.machine.ranks)
    buffers = (
        {
            n.removeprefix("model."): b
            for module in engine.modules
            for n, b in module.named_buffers()
        }
        if (case.engine != "deepspeed")
        else {}
    )
    for name, buffer in buffers.items():  # each rank has them, not their owner alone
        torch.testing.assert_close(buffer, weights[name], rtol=0, atol=0)
    engine.close()
    return losses, gradients, weights, float(total / count)


def plainly(case: Case, together: bool) -> Outcome:
    from trainer.models.materialise import materialise

    spec, _ = spec_and_task()
    model = spec.build()
    materialise(model, spec, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), **case.optimizer["params"])
    losses, gradients = [], []
    for step in range(STEPS):
        size = case.micro_batch * (case.data_ranks if together else 1)
        batch, total = samples(step), 0.0
        for start in range(0, TRAIN_BATCH, size):
            images, targets = (
                torch.stack(values) for values in zip(*batch[start : start + size], strict=True)
            )
            loss = cross_entropy(model(images), targets, reduction="sum") / TRAIN_BATCH
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    evaluated = copy.deepcopy(model).eval()
    images, targets = (torch.stack(values) for values in zip(*samples(99), strict=True))
    with torch.no_grad():
        held_out = float(cross_entropy(evaluated(images), targets))
    return losses, gradients, {n: v.detach() for n, v in model.state_dict().items()}, held_out


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-6, atol=0)
    for mine, wanted in zip(ours[1], theirs[1], strict=True):
        largest = max(value.abs().max() for value in wanted.values())
        for name, value in wanted.items():
            # relative to the largest of all: the bias before a batch norm has a gradient of
            # rounding alone
            assert (mine[name].reshape(value.shape) - value).abs().max() <= 2e-5 * largest, name
    assert ours[2].keys() == theirs[2].keys()
    for name, value in theirs[2].items():
        torch.testing.assert_close(
            ours[2][name].reshape(value.shape), value, rtol=1e-4, atol=2e-5, msg=name
        )
    assert ours[3] == pytest.approx(theirs[3], rel=1e-4)


@pytest.mark.first("mesh DDP", "accelerate FSDP", "deepspeed ZeRO-2", "mesh pipeline")
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does_on_the_same_micro_batches(pools, name):
    case = CASES[name]
    reference = plainly(case, together=False)
    for outcome in pools[case.world_size].run(trained, case=case, together=False):
        assert_equal(outcome, reference)


@pytest.mark.first("mesh DDP")
@pytest.mark.parametrize("name", TOGETHER)
def test_synchronised_it_trains_as_one_process_on_the_micro_batches_of_all_data_ranks_together(
    pools, name
):
    case = TOGETHER[name]
    reference = plainly(case, together=True)
    for outcome in pools[case.world_size].run(trained, case=case, together=True):
        assert_equal(outcome, reference)


LOW = {
    name: replace(CASES[name], precision="bfloat16")
    for name in ("deepspeed ZeRO-2", "accelerate FSDP", "mesh HSDP")
}


@pytest.mark.more
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", LOW)
def test_in_16_bits_it_stays_near_float32(pools, name, together):
    reference = plainly(LOW[name], together)
    for losses, _, weights, held_out in pools[LOW[name].world_size].run(
        trained, case=LOW[name], together=together
    ):
        assert losses == pytest.approx(reference[0], rel=0.02) and held_out == pytest.approx(
            reference[3], rel=0.05
        )
        for statistic in ("0.1.running_mean", "2.1.running_var"):
            assert weights[statistic].dtype == torch.float32
            torch.testing.assert_close(
                weights[statistic], reference[2][statistic], rtol=0.05, atol=0.02
            )


def checked_in(build: Any, **sizes: Any) -> tuple[str, ...]:
    """Return the lines that a start prints about a layout on two processes."""
    from trainer.distributed.ranks import Ranks
    from trainer.models.own.module import spec_of
    from trainer.parallel.checks import checked
    from trainer.tasks.supervised import Supervised

    spec = spec_of(build, None, 5)
    task = Supervised(loss_of, spec.build, spec.blocks)
    spec = spec.tried_on(task.trial(samples(0)[:4]))
    layout = layout_of(replace(MESH, zero_stage=0, micro_batch=sizes.pop("micro_batch", 2)))
    return checked(spec, task, replace(layout, **sizes), Ranks(0, 1))[1]


def test_the_lines_say_what_is_normalised_together():
    [line] = checked_in(network)
    shows(line, "0.1", "takes statistics", "2 samples", "micro-batch")
    [line] = checked_in(network, sync_batch_norm=True)
    shows(line, "2 samples", "2 data ranks together", "(trainer.sync_batch_norm)")
    assert checked_in(lambda: nn.Sequential(nn.Flatten(), nn.Linear(81, 5))) == ()


def test_a_single_sample_has_no_statistics():
    def flat() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(81, 5), nn.BatchNorm1d(5))

    with raises(ConfigError, "train_micro_batch_size_per_gpu", "least 2 samples"):
        checked_in(flat, micro_batch=1)
    assert checked_in(network, micro_batch=1)  # an image has several positions


def test_pytorchs_own_synchronised_by_another_name_is_refused():
    with raises(ConfigError, "0 is", "nn.SyncBatchNorm", "nn.BatchNorm", "trainer.sync_batch_norm"):
        checked_in(lambda: nn.Sequential(nn.SyncBatchNorm(1), nn.Flatten(), nn.Linear(81, 5)))


def test_other_running_statistics_are_not_synchronised():
    def instances() -> nn.Module:
        return nn.Sequential(
            nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(81, 5)
        )

    with raises(ConfigError, "trainer.sync_batch_norm: Sequential", "in 0"):
        checked_in(instances, sync_batch_norm=True)
    [line] = checked_in(instances)
    assert "batch norm (0, ...)" in line


CERTIFIED = """
import trainer
from tests.support.parallel.batch_norm import loss_of, network, samples
from trainer.parallel import batch_norm

data = [sample for step in range(6) for sample in samples(step)]
config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "trainer": {"device": "cpu"}}
layouts = [["zero_optimization.stage=2", "trainer.engine=mesh"], ["zero_optimization.stage=3"],
    ["pipeline.stages=2", "trainer.engine=mesh"], ["trainer.sync_batch_norm=true"]]
for overrides in layouts:
    found = trainer.verify(config, model=network, data=data, loss=loss_of, overrides=overrides, processes=2)
    print("PASSED", found.passed, [] if found.passed else found)
whole = batch_norm._NormOfStep.weighted
batch_norm._NormOfStep.weighted = lambda self, *sizes: 1.01 * whole(self, *sizes)
print("FAULT", trainer.verify(config, model=network, data=data, loss=loss_of, overrides=layouts[0], processes=2))
"""


@pytest.mark.more
def test_it_is_certified_and_a_fault_of_its_statistics_is_named(tmp_path):
    result = script(tmp_path, CERTIFIED.replace("FOLDER", str(tmp_path)))
    assert result.code == 0, result.output
    assert result.output.count("PASSED True") == 4, result.output
    assert (
        "check='update', step=0" in (fault := result.output.split("FAULT")[1])
        and "where='0.1.running_mean'" in fault
    )
