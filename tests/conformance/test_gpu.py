"""The conformance cases on GPUs, through NCCL, on 1 to N ranks: `pytest -m gpu`, where there are
any.

Nothing drops in them: a GPU draws other numbers than the processor on which the reference is
trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.pool import Pools
from tests.support.training import (
    GPT2,
    LLAMA,
    Case,
    assert_near,
    assert_same,
    resume_by_engine,
    train_by_engine,
    train_plainly,
)

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu

STILL = LLAMA | {"attention_dropout": 0.0, "num_hidden_layers": 4, "intermediate_size": 64}
STILL_GPT2 = GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_layer": 4}
ONE = Case(world_size=1, micro_batch=2, model=STILL)
TWO = replace(ONE, world_size=2)
FOUR = replace(ONE, world_size=4, micro_batch=1)
EIGHT = replace(FOUR, world_size=8)
ALL = {"offload_optimizer": "cpu", "offload_param": "cpu"}

CASES: dict[str, Case] = {
    "one, deepspeed": replace(ONE, zero_stage=0),
    "one, deepspeed, ZeRO-3": replace(ONE, zero_stage=3),
    "one, mesh": replace(ONE, engine="mesh", zero_stage=0),
    "one, mesh, ZeRO-3, recompute": replace(ONE, engine="mesh", zero_stage=3, recompute="full"),
    "one, mesh, offload": replace(ONE, engine="mesh", zero_stage=3, **ALL),
    "one, mesh, GPT-2, selective": replace(
        ONE, engine="mesh", zero_stage=2, model=STILL_GPT2, recompute="selective"
    ),
    **{
        f"two, {engine}, ZeRO-{stage}": replace(TWO, engine=engine, zero_stage=stage)
        for engine in ("deepspeed", "accelerate", "mesh")
        for stage in (0, 2, 3)
    },
    "two, mesh, offload": replace(TWO, engine="mesh", zero_stage=3, **ALL),
    "two, accelerate, offload": replace(TWO, engine="accelerate", zero_stage=3, **ALL),
    "two, deepspeed, offload": replace(TWO, zero_stage=2, offload_optimizer="cpu"),
    "two, mesh, pipeline": replace(TWO, engine="mesh", pipeline=2, zero_stage=0),
    "two, deepspeed, pipeline": replace(TWO, pipeline=2, zero_stage=0),
    "two, mesh, tensor": replace(TWO, engine="mesh", tensor=2, zero_stage=2),
    "four, mesh, HSDP": replace(FOUR, engine="mesh", replicate=2, zero_stage=3),
    "four, accelerate, HSDP": replace(FOUR, engine="accelerate", replicate=2, zero_stage=3),
    "four, mesh, pipeline x ZeRO-3": replace(FOUR, engine="mesh", pipeline=2, zero_stage=3),
    "four, mesh, ZBVZeroBubble": replace(
        FOUR, engine="mesh", pipeline=2, zero_stage=2, schedule="ZBVZeroBubble"
    ),
    "four, mesh, tensor x ZeRO-3": replace(FOUR, engine="mesh", tensor=2, zero_stage=3),
    "eight, mesh, all axes": replace(EIGHT, engine="mesh", pipeline=2, tensor=2, zero_stage=2),
    "eight, mesh, pipeline x HSDP": replace(
        EIGHT, engine="mesh", pipeline=2, replicate=2, zero_stage=3
    ),
}


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[Pools]:
    result = Pools("nccl")
    yield result
    result.close()


def fits(case: Case) -> None:
    if case.world_size > GPUS:
        pytest.skip(f"needs {case.world_size} GPUs, and there are {GPUS}")


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(gpu_pools: Any, name: str) -> None:
    case = CASES[name]
    fits(case)
    reference = train_plainly(case)
    for outcome in gpu_pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-5)


@pytest.mark.parametrize("engine", ["deepspeed", "mesh"])
def test_bfloat16_stays_near_float32(gpu_pools: Any, engine: str) -> None:
    case = replace(ONE if GPUS < 2 else TWO, engine=engine, zero_stage=2, precision="bfloat16")
    fits(case)
    reference = train_plainly(case)
    for outcome in gpu_pools[case.world_size].run(train_by_engine, case=case):
        assert_near(outcome, reference)


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate", "mesh"])
def test_a_resumed_run_goes_on(gpu_pools: Any, tmp_path: Any, engine: str) -> None:
    case = replace(TWO, engine=engine, zero_stage=3)
    case = replace(case, world_size=1) if GPUS == 1 and engine != "accelerate" else case
    fits(case)
    for losses, _ in gpu_pools[case.world_size].run(
        resume_by_engine, before=case, after=case, folder=tmp_path
    ):
        assert losses[0] == pytest.approx(
            losses[1], rel=1e-6
        )  # reductions on a GPU may sum in another order


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen3"])
def test_packed_documents_are_as_if_alone_without_a_mask(name: str, precision: str) -> None:
    """By cu_seqlens in bfloat16, in blocks in float32; the reference is float32 on the processor."""
    from tests.support.data.packing import loss_alone, packed_samples
    from tests.support.models.masks import tiny
    from trainer.tasks.kernel_probes import notes, tested

    spec, task, model = tiny(name, hidden_size=64, head_dim=16)
    own, samples = tiny(name, hidden_size=64, head_dim=16)[2], packed_samples(0, 3)
    device, dtype = torch.device("cuda", 0), getattr(torch, precision)
    lines = list(notes(task.attention(), spec, True, dtype, device))
    print(*lines, sep="\n")
    chosen = {tested(task.attention(), kind, dtype, device)[0] for kind in ("causal", "window")}
    assert chosen == {"cu_seqlens" if precision == "bfloat16" else "blocks"}, lines
    inputs = {key: value.to(device) for key, value in task.collate(samples).items()}
    loss = task.loss_sum(model.to(device, dtype), inputs)
    loss.backward()
    alone = loss_alone(own, samples)
    alone.backward()
    near = 2e-2 if precision == "bfloat16" else 1e-4
    torch.testing.assert_close(loss.cpu().float(), alone, rtol=near, atol=near)
    for (key, mine), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        if theirs.grad is not None and mine.grad is not None:
            difference = (mine.grad.cpu().float() - theirs.grad).norm() / theirs.grad.norm()
            assert difference <= 5 * near, key


def test_the_gradient_of_a_heads_weight_is_summed_in_float32(monkeypatch: Any) -> None:
    from trainer.tasks.losses import chunks, cross_entropy

    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 * 512 * 4)
    torch.manual_seed(0)
    drawn = torch.randn(512, 32), torch.randn(512, 32), torch.randint(512, (512,))
    results = []
    for device in ("cpu", "cuda"):
        hidden, weight = (part.to(device, torch.bfloat16).requires_grad_() for part in drawn[:2])
        loss = cross_entropy.linear_cross_entropy(hidden, weight, None, drawn[2].to(device))
        results.append([part.cpu() for part in torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(*results, rtol=2**-7, atol=1e-2)
