"""Muon over shards, replicas and tensor ranks against `torch.optim.Muon`, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.optim.muon import MUON, finely
from tests.support.training import LLAMA, Case, assert_same, spec_of, train_by_engine, train_plainly
from trainer.optim.muon import Shared, hidden_matrices

SHAPES = {"tall": (7, 3), "wide": (4, 6), "short": (1, 4), "experts": (3, 6, 4), "bias": (5,)}


def steps_of_muon(norms: list[float], sizes: tuple[int, int]) -> list[bool]:
    """True for each weight and momentum that is PyTorch's, bit for bit. Runs on each rank.

    The mesh is `sizes`: [replicate, shard], as FSDP has it; "wide" is whole on each rank.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from trainer.optim.muon import Muon, Shared
    from trainer.optim.optimizer import step_if_finite

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    places = [{"replicate": rank // sizes[1], "shard": rank % sizes[1]} for rank in range(4)]
    shared = Shared(set(), torch.device("cpu"), dist.group.WORLD, dist.get_rank(), places)
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    own, plain = {}, {}
    for name, value in values.items():
        plain[name] = torch.nn.Parameter(value.clone())
        whole = name == "wide"
        part = value if whole else distribute_tensor(value, mesh, [Replicate(), Shard(0)])
        own[name] = torch.nn.Parameter(part.clone())
    both: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    groups = [
        {"params": [p for n, p in own.items() if n != "bias"], "muon": True, "lr_multiplier": 1.0},
        {"params": [own["bias"]], "lr_multiplier": 1.0},
    ]
    ours = Muon(groups, shared=shared, adam_lr=0.01, fused=True, **both)
    ours.param_groups[1]["lr"] *= ours.param_groups[1]["lr_multiplier"]
    experts = [torch.nn.Parameter(one.clone()) for one in values["experts"]]
    two = [*experts, *(plain[name] for name in ("tall", "wide", "short"))]
    theirs = (
        torch.optim.Muon(two, **both),
        torch.optim.AdamW([plain["bias"]], 0.01, fused=True, weight_decay=0.2),
    )
    for norm in norms:
        gradients = {name: torch.randn(value.shape) for name, value in values.items()}
        for name, gradient in gradients.items():
            poisoned = gradient if norm == norm else gradient * float("nan")
            whole = name == "wide"
            own[name].grad = (
                poisoned if whole else distribute_tensor(poisoned, mesh, [Replicate(), Shard(0)])
            )
            plain[name].grad = gradient
        for one, gradient in zip(experts, gradients["experts"], strict=True):
            one.grad = gradient
        step_if_finite(ours, torch.tensor(norm))
        if norm == norm:
            for optimizer in theirs:
                optimizer.step()
    plain["experts"] = torch.stack(experts)
    results = []
    for name, parameter in own.items():
        whole = parameter.full_tensor() if name != "wide" else parameter
        results.append(torch.equal(whole, plain[name]))
    momentum = ours.state[own["tall"]]["momentum_buffer"].full_tensor()
    return [*results, torch.equal(momentum, theirs[0].state[plain["tall"]]["momentum_buffer"])]


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
def test_an_owner_makes_the_very_update_of_the_whole_matrix(pools, sizes):
    for result in pools[4].run(steps_of_muon, norms=[1.0, float("nan"), 1.0], sizes=sizes):
        assert all(result), result


def test_it_updates_the_matrices_of_blocks_and_no_others():
    names = {
        name.rpartition("layers.0.")[2] for name in hidden_matrices(spec_of(LLAMA)) if ".0." in name
    }
    assert names == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


EXPERTS = {
    **LLAMA,
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    **{"moe_intermediate_size": 16, "attention_dropout": 0.0},
}
SPLIT = {**LLAMA, "attention_dropout": 0.0}
LAYOUTS = {
    "ddp": Case("mesh", zero_stage=0),
    "accelerate": Case("accelerate", zero_stage=2),
    "accelerate, ddp": Case("accelerate", zero_stage=0),
    "zero3": Case("mesh", zero_stage=3),
    "tensor": Case("mesh", zero_stage=0, tensor=2, model=SPLIT),
    "pipeline": Case("mesh", zero_stage=2, pipeline=2),
    "offload": Case("mesh", zero_stage=3, offload_optimizer="cpu"),
    "experts": Case("mesh", zero_stage=3, model=EXPERTS),
}
FOUR = {
    "experts, hsdp": Case("accelerate", world_size=4, zero_stage=3, replicate=2, model=EXPERTS),
    "experts divided, hsdp": Case(
        "mesh", world_size=4, zero_stage=2, replicate=2, expert=2, model=EXPERTS
    ),
    "experts half divided": Case("mesh", world_size=4, zero_stage=3, expert=2, model=EXPERTS),
    "experts x tensor": Case("mesh", world_size=4, zero_stage=3, tensor=2, model=EXPERTS),
    "hsdp": Case("mesh", world_size=4, zero_stage=3, replicate=2),
    "accelerate, hsdp": Case("accelerate", world_size=4, zero_stage=2, replicate=2),
    "zero3 x tensor": Case("mesh", world_size=4, zero_stage=3, tensor=2, model=SPLIT),
    "ddp x tensor": Case("mesh", world_size=4, zero_stage=0, tensor=2, model=SPLIT),
    "pipeline x zero": Case("mesh", world_size=4, zero_stage=2, pipeline=2),
    "pipeline x tensor": Case(
        "mesh", world_size=4, zero_stage=0, pipeline=2, tensor=2, model=SPLIT
    ),
}


@pytest.mark.first("zero3", "experts")
@pytest.mark.parametrize("name", [*LAYOUTS, *FOUR])
def test_trains_as_one_process_does(pools, name):
    case = replace((LAYOUTS | FOUR)[name], optimizer=MUON)
    reference = finely(train_plainly, case=case)
    for outcome in pools[case.world_size].run(finely, train=train_by_engine, case=case):
        assert_same(outcome, reference, 2e-5)


def test_the_senders_to_an_owner_are_looked_up_once():
    places = [{"replicate": rank // 8, "shard": rank % 8} for rank in range(32)]
    shared = Shared(set(), torch.device("cpu"), None, 0, places)
    with mock.patch.object(Shared, "_nearest", autospec=True, side_effect=Shared._nearest) as found:
        for _ in range(3):
            assert shared.senders(9, ("shard",)) == {5, 6, 7, 8, 9, 10, 11, 12}
            assert len(shared.senders(9, ("replicate", "shard"))) == 32
    assert found.call_count == 2
