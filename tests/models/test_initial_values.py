"""Initial values of large tensors, drawn in blocks of rows: the same in parts as whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layouts import EXPERTS, UNTIED, family
from tests.support.training import Case, layout_of, spec_of
from trainer.distributed import initial_values
from trainer.distributed.initial_values import initialising
from trainer.engines.deepspeed.engine import KIND
from trainer.models.materialise import on_host
from trainer.state import MASTER, WEIGHT


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw tensors of 64 values and more in blocks of 16."""
    monkeypatch.setattr(initial_values, "LARGE", 64)
    monkeypatch.setattr(initial_values, "BLOCK", 16)


def read(weight: torch.Tensor) -> None:
    weight.normal_()
    weight /= weight.norm()


def pad(weight: torch.Tensor) -> None:
    weight.normal_(0.0, 0.02)
    weight[3].zero_()
    weight.mul_(2.0)


def through_a_view(weight: torch.Tensor) -> None:
    weight.T.normal_()


FILLED: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda weight: nn.init.normal_(weight, 1.0, 0.02),
    "data": lambda weight: weight.data.normal_(mean=0.0, std=0.02),
    "xavier": lambda weight: nn.init.xavier_uniform_(weight),
    "kaiming": lambda weight: nn.init.kaiming_normal_(weight),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.5),
    "orthogonal": lambda weight: nn.init.orthogonal_(weight),
    "scaled": lambda weight: weight.uniform_(-1, 1).mul_(3.0).add_(1.0).clamp_(-1, 2),
    "ones": lambda weight: nn.init.ones_(weight),
    "two draws": lambda weight: weight.normal_().uniform_(),
    "norm": read,
    "padding": pad,
    "view": through_a_view,
}


def filled(kind: str, rows: range, name: str = "layer") -> torch.Tensor:
    weight = torch.full((10, 8), torch.nan)
    with torch.no_grad(), initialising(5, name, {weight: rows}):
        FILLED[kind](weight)
    return weight


@pytest.mark.parametrize("kind", FILLED)
def test_the_rows_of_a_rank_are_those_of_the_whole(small_blocks: None, kind: str) -> None:
    whole = filled(kind, range(10))
    assert whole.isfinite().all()
    for rows in (range(3), range(3, 7), range(9, 10), range(4, 4)):
        assert torch.equal(
            filled(kind, rows)[rows.start : rows.stop], whole[rows.start : rows.stop]
        )
    other = filled(kind, range(10), "another")
    assert kind == "ones" or not torch.equal(other, whole)


def test_only_the_blocks_of_a_ranks_rows_are_drawn(small_blocks: None) -> None:
    """Blocks of 16 values are two rows of 8."""
    weight = filled("normal", range(3, 7))
    assert weight.isfinite().all(1).tolist() == [False] * 2 + [True] * 6 + [False] * 2


def test_blocks_differ_and_are_of_the_law(small_blocks: None) -> None:
    weight = torch.empty(4096, 16)
    with torch.no_grad(), initialising(0, "layer", {weight: range(4096)}):
        weight.normal_(1.0, 2.0)
    assert len(weight[:, 0].unique()) == 4096
    assert float(weight.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(weight.std()) == pytest.approx(2.0, abs=0.03)


def test_a_small_tensor_is_drawn_as_ever() -> None:
    from trainer.distributed.seeding import seeded_init

    weight, plain = torch.empty(8, 8), torch.empty(8, 8)
    with torch.no_grad(), initialising(0, "layer", {weight: range(2)}):
        weight.normal_()
    with torch.no_grad(), seeded_init(0, "layer"):
        plain.normal_()
    assert torch.equal(weight, plain)


def sharded_values(case: Case) -> dict[str, float]:
    """Return the largest difference of each parameter from one process's. On each rank."""
    import torch.distributed as dist

    from tests.support.training import build
    from trainer.distributed.dtensor import local, own_shard
    from trainer.tasks.task import bare_name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_values, "LARGE", 64)
        patch.setattr(initial_values, "BLOCK", 16)
        whole = dict(on_host(spec_of(case.model), 5).named_parameters())
        engine = build(case, dist.get_rank())
        differences = {}
        for name, parameter in engine.modules[0].named_parameters():
            expected = own_shard(whole[bare_name(name)].detach(), parameter)  # type: ignore[arg-type]
            values = local(parameter).detach()
            assert values.shape == expected.shape, name
            differences[name] = float((values - expected).abs().sum())
        engine.close()
    return differences


def partitioned_values(case: Case) -> tuple[dict[str, float], int, int]:
    """Return how masters and weights differ from one process's, and the values drawn and sent."""
    import deepspeed.comm
    import torch.distributed as dist

    from tests.support.training import build

    drawn = sent = 0
    run = initial_values._run

    def counted(function: Any, arguments: Any, seed: Any, tensor: Any, rows: range) -> None:
        nonlocal drawn
        drawn += tensor[rows.start : rows.stop].numel() if seed else 0
        run(function, arguments, seed, tensor, rows)

    broadcast = deepspeed.comm.broadcast

    def sending(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal sent
        sent += tensor.numel()
        return broadcast(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_values, "LARGE", 64)
        patch.setattr(initial_values, "BLOCK", 16)
        patch.setattr(initial_values, "_run", counted)
        patch.setattr(deepspeed.comm, "broadcast", sending)
        whole = dict(on_host(spec_of(case.model), 5).named_parameters())
        drawn = 0
        engine = build(case, dist.get_rank())
        differences = {}
        for entry in engine.state_tensors():
            value = whole[entry.name].detach().to(entry.dtype)
            for part in entry.parts() if entry.key in (WEIGHT, MASTER) else ():
                key = f"{entry.name} {entry.key} {part.offset}"
                differences[key] = float((part.value - part.within(value)).abs().sum())
        engine.close()
    return differences, drawn, sent


IN_DEEPSPEED = Case(engine="deepspeed", zero_stage=3, world_size=4, micro_batch=1, model=UNTIED)
PARTITIONED = {
    "float32": IN_DEEPSPEED,
    "bfloat16": replace(IN_DEEPSPEED, precision="bfloat16"),
    "experts": replace(IN_DEEPSPEED, model=EXPERTS, expert=2),
    "experts in bfloat16": replace(IN_DEEPSPEED, model=EXPERTS, expert=2, precision="bfloat16"),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "experts in bfloat16" else pytest.param(name, marks=pytest.mark.more)
        for name in PARTITIONED
    ],
)
def test_zero_3_of_deepspeed_draws_its_partitions_alone(pools: Any, name: str) -> None:
    case = PARTITIONED[name]
    if reason := KIND.refusal(layout_of(case)):
        pytest.skip(reason)
    total = sum(p.numel() for p in on_host(spec_of(case.model), 5).parameters())
    total *= 2 if case.precision == "bfloat16" else 1  # its masters are drawn, too
    for differences, drawn, sent in pools[4].run(partitioned_values, case=case):
        assert len(differences) > 10
        assert set(differences.values()) == {0.0}
        assert 0 < drawn < (0.5 if case.expert == 1 else 0.7) * total
        assert sent == 0


@pytest.mark.more
def test_autotp_draws_its_masters_alone(pools: Any) -> None:
    case = replace(
        IN_DEEPSPEED, zero_stage=1, tensor=2, precision="bfloat16", model=family("llama")
    )
    if reason := KIND.refusal(layout_of(case)):
        pytest.skip(reason)
    for differences, *_ in pools[4].run(partitioned_values, case=case):
        assert len(differences) > 10
        assert set(differences.values()) == {0.0}


@pytest.mark.parametrize(
    "case",
    [
        Case(engine="mesh", zero_stage=3, world_size=4, micro_batch=1, model=UNTIED),
        Case(
            engine="mesh",
            zero_stage=3,
            world_size=4,
            tensor=2,
            micro_batch=2,
            model=family("llama"),
        ),
        Case(engine="mesh", zero_stage=3, world_size=4, expert=2, micro_batch=1, model=EXPERTS),
    ],
    ids=["ZeRO-3", "ZeRO-3 and tensor", "ZeRO-3 and experts"],
)
def test_shards_have_the_values_of_one_process(pools: Any, case: Case) -> None:
    for differences in pools[4].run(sharded_values, case=case):
        assert len(differences) > 10
        assert set(differences.values()) == {0.0}
