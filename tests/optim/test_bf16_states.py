"""Weights and optimizer state kept in bfloat16 alone, as DeepSpeed's `bf16_optimizer_states`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import (
    STEPS,
    Case,
    plain_optimizer,
    resume_by_engine,
    samples,
    shares,
    spec_of,
    task_of,
    train_by_engine,
)

OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "fused": True},
}
KEPT = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
CASE = Case("mesh", zero_stage=3, precision="bfloat16", optimizer=OPTIMIZER, more=KEPT)
CASES = {
    "zero3": CASE,
    "zero2": replace(CASE, zero_stage=2),
    "accelerate": replace(CASE, engine="accelerate"),
    "hsdp": replace(CASE, world_size=4, replicate=2, micro_batch=1),
    "offload": replace(CASE, offload_optimizer="cpu"),
}


def train_in_bfloat16(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in one process with PyTorch's AdamW over bfloat16; return losses and weights.

    The gradients of data ranks are averaged in float32; those of micro-batches are added up in
    bfloat16, or with replicas of shards, which FSDP2 adds up at the end, in float32.
    """
    from trainer.distributed.seeding import step_seed
    from trainer.models.materialise import Placement, materialise
    from trainer.parallel.forward_backward import Dropout
    from trainer.tasks.task import ModelWithLoss

    spec = spec_of(case.model)
    task = task_of(spec)
    model = task.prepare(spec.build())
    materialise(model, spec, seed=5, placement=Placement(dtype=torch.bfloat16))
    dropout, module, losses = Dropout(model, spec), ModelWithLoss(model, task), []
    optimizer, parameters = plain_optimizer(case, model), list(model.parameters())
    module.train()
    for step in range(STEPS):
        counted = sum(int((s["targets"] != -100).sum()) for s in samples(step))
        between = torch.float32 if case.replicate > 1 else torch.bfloat16
        total, added = 0.0, [torch.zeros(p.shape, dtype=between) for p in parameters]
        # what dropout draws depends on the width
        batches = [
            task.padded([task.collate(share) for share in shares(case, step, rank)])
            for rank in range(case.data_ranks)
        ]
        for index in range(case.accumulation):
            sums = [torch.zeros(p.shape) for p in parameters]
            for rank in range(case.data_ranks):
                dropout.start(step_seed(5, step, rank), index)
                loss = module(batches[rank][index])
                total += float(loss.detach())
                scaled = loss * (case.data_ranks / counted)
                for one, gradient in zip(
                    sums, torch.autograd.grad(scaled, parameters), strict=True
                ):
                    one += gradient
            for one, gradient in zip(added, sums, strict=True):
                one += (gradient / case.data_ranks).to(between)
        losses.append(total / counted)
        for parameter, gradient in zip(parameters, added, strict=True):
            parameter.grad = gradient.bfloat16()
        norms = torch.stack(
            torch._foreach_norm([p.grad for p in parameters], 2, torch.float64)
        ).float()
        torch.nn.utils.clip_grads_with_norm_(parameters, case.clip, norms.norm())
        optimizer.step()
    return losses, {name: p.detach().float() for name, p in model.named_parameters()}


def kept(case: Case) -> list[tuple[str, torch.dtype, int]]:
    """Return key, dtype and bytes here of all that an engine keeps after a step. On each rank."""
    import torch.distributed as dist

    from tests.support.training import build, collated, data_rank_of
    from trainer.distributed.dtensor import local
    from trainer.optim.lr_schedules import Update

    rank = dist.get_rank()
    engine = build(case, rank)
    batches = [
        collated(engine.job.task, share) for share in shares(case, 0, data_rank_of(case, rank))
    ]
    engine.step(0, batches, Update(1e-2))
    results = [("weight", local(p)) for module in engine.modules for p in module.parameters()]
    for state in engine._optimizer.state.values():
        results += [(key, local(value)) for key, value in state.items() if value.ndim]
    engine.close()
    return [(key, value.dtype, value.nbytes) for key, value in results]


@pytest.mark.first("zero3")
@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_process_does(pools, name):
    """But for some last bits, where a sum of ranks in another order is rounded to bfloat16."""
    case = CASES[name]
    losses, weights = train_in_bfloat16(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert outcome.losses == pytest.approx(losses, rel=1e-3)
        off = torch.cat(
            [(outcome.weights[key] != value).float().flatten() for key, value in weights.items()]
        )
        assert off.mean() <= 0.02
        for key, value in weights.items():
            torch.testing.assert_close(outcome.weights[key], value, rtol=2**-6, atol=2e-3)


def test_weights_and_state_are_in_bfloat16_alone(pools):
    for result in pools[2].run(kept, case=CASE):
        assert {key for key, _, _ in result} == {"weight", "exp_avg", "exp_avg_sq"}
        assert {dtype for _, dtype, _ in result} == {torch.bfloat16}


@pytest.mark.more
@pytest.mark.parametrize("after", ["zero2", "accelerate", "float32"])
def test_a_checkpoint_goes_on_in_another_layout(pools, tmp_path: Path, after: str) -> None:
    """Bit for bit in shards of FSDP2; with float32 state, from what was kept."""
    cases: dict[str, Any] = CASES | {"float32": replace(CASE, more={})}
    arguments = {"before": CASE, "after": cases[after], "folder": tmp_path}
    for losses, weights in pools[2].run(resume_by_engine, **arguments):
        assert losses[0][0] == losses[1][0]
        exact = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])
        assert exact == (after != "float32")
