"""Parameters are sharded block by block, and replicas agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.counted import count, workload
from tests.support.layouts import HSDP, TWO_EXPERTS, UNTIED
from tests.support.messages import raises, shows_each
from tests.support.training import LLAMA, VOCABULARY, Case, spec_of, train_by_engine, train_plainly

MESH = Case(engine="mesh")


def sharded_share(case: Case) -> tuple[float, int]:
    """Return the local share of all parameters, and the number of FSDP units. On each rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from tests.support.training import build

    engine = build(case, dist.get_rank())
    parameters = list(engine.modules[0].parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    kept = sum(parameter.to_local().numel() for parameter in parameters)
    return kept / sum(p.numel() for p in parameters), sum(
        isinstance(m, FSDPModule) for m in engine.modules[0].modules()
    )


def test_parameters_are_really_sharded(pools):
    hsdp = replace(HSDP, zero_stage=3)
    for case in (
        replace(MESH, zero_stage=3),
        replace(hsdp, engine="mesh"),
        replace(hsdp, engine="accelerate"),
    ):
        for kept, units in pools[case.world_size].run(sharded_share, case=case):
            assert kept == pytest.approx(0.5, abs=0.02)
            assert units == 4  # three blocks and the root


def held_values(case: Case) -> int:
    """Return the values of the parameters that this rank holds. Runs on each rank of a pool."""
    import torch.distributed as dist

    from tests.support.training import build
    from trainer.distributed.dtensor import local

    engine = build(case, dist.get_rank())
    kept = sum(local(p).numel() for p in engine.modules[0].parameters())
    engine.close()
    return kept


@pytest.mark.first("mesh")
@pytest.mark.parametrize("engine", ["mesh", "accelerate"])
def test_experts_that_are_fewer_than_the_ranks_are_divided_alike(pools, engine):
    """FSDP2's own way gives two of four ranks an expert each, and the others none."""
    model = TWO_EXPERTS
    case = replace(MESH, engine=engine, world_size=4, zero_stage=3, micro_batch=1, model=model)
    kept = pools[4].run(held_values, case=case)
    assert max(kept) < 1.05 * min(kept)


@given(st.integers(1, 70), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_no_other_dimension_is_divided_than_one_that_the_ranks_divide(ranks, shape):
    from trainer.parallel.shard import placement

    result = placement(ranks, torch.nn.Parameter(torch.empty(shape)))
    filled = -(-shape[0] // ranks) * ranks
    if result is not None:
        assert len(shape) > 2 and filled >= 1.25 * shape[0] and shape[result.dim] % ranks == 0
    elif len(shape) > 2 and filled >= 1.25 * shape[0]:
        assert all(size % ranks for size in shape)


def trained_on_lengths(case: Case, lengths: list[tuple[int, ...]]) -> list[float]:
    """Return each step's loss, with an evaluation after it; `lengths`: a row's, by data rank."""
    import numpy as np
    import torch.distributed as dist

    from tests.support.training import build, collated, data_rank_of, spec_in, task_of
    from trainer.optim.lr_schedules import Update

    engine, task = build(case, dist.get_rank()), task_of(spec_in(case), case)
    losses = []
    for step, of_ranks in enumerate(lengths):
        ids = np.arange(of_ranks[data_rank_of(case, dist.get_rank())]) % VOCABULARY
        row: dict[str, Any] = {"input_ids": ids.astype(np.int32), "targets": ids.astype(np.int64)}
        batches = [collated(task, [row] * case.micro_batch) for _ in range(case.accumulation)]
        losses.append(float(engine.step(step, batches, Update(1e-2)).loss()))
        engine.evaluate(batches)
    engine.close()
    return losses


@pytest.mark.first("1F1B-2")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_length_that_is_new_to_one_data_rank_after_an_evaluation_does_not_stop_a_pipeline(
    pools, schedule, stage
):
    layers = LLAMA | {"num_hidden_layers": 4}
    case = replace(
        MESH, world_size=4, pipeline=2, zero_stage=stage, schedule=schedule, model=layers
    )
    result = pools[4].run(
        trained_on_lengths, timeout=60, case=case, lengths=[(6, 6), (7, 6), (7, 9), (6, 6)]
    )
    assert result == [result[0]] * 4


def with_another_start(case: Case) -> str:
    """Build an engine whose rank 3 has drawn other initial values. Runs on each rank."""
    import torch.distributed as dist

    from tests.support.training import build
    from trainer.errors import NumericsError

    try:
        build(case, dist.get_rank(), values_seed=5 + (dist.get_rank() == 3))
    except NumericsError as error:
        return str(error)
    return "no error"


@pytest.mark.first("mesh")
@pytest.mark.parametrize("engine", ["mesh", "accelerate"])
def test_replicas_that_disagree_are_found(pools, engine):
    result = pools[4].run(with_another_start, case=replace(HSDP, zero_stage=3, engine=engine))
    # rank 3 shares its replica's other half with rank 2, which is not at fault
    shows_each(result, *[("replicas", "initial values", "rank 3", "rank 1")] * 4)


def test_one_flat_unit_is_an_error(monkeypatch):
    from tests.support.training import spec_of
    from trainer.errors import NumericsError
    from trainer.parallel.shard import check_units

    spec = spec_of(LLAMA)
    with raises(NumericsError, "FSDP: 3 of 3", "blocks", "unit", "unit per"):
        check_units(spec.build(), spec)


@pytest.mark.more
def test_a_class_of_blocks_that_stands_elsewhere_too_is_refused_where_units_go_by_class():
    """Accelerate wraps the nested layer, and the first step mixes tensors and DTensors."""
    from torch import nn

    from tests.support.probing import layout
    from trainer.engines import ENGINES
    from trainer.errors import ConfigError
    from trainer.models.own.module import spec_of as spec_of_module

    spec = spec_of_module(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8)), None, 0
    )
    sharded = layout(shard=2, accumulation=1, zero_stage=3)
    with raises(ConfigError, "block's class", "trainer.engine"):
        ENGINES["accelerate"].check(spec, sharded)
    ENGINES["mesh"].check(spec, sharded)


FOUR = {"shard": 2, "accumulation": 4, "precision": "bfloat16", "model": UNTIED}


@pytest.mark.more
@pytest.mark.parametrize(("engine", "replicate"), [("mesh", 2), ("mesh", 1), ("accelerate", 2)])
def test_each_unit_is_gathered_and_reduced_no_more_often_than_it_has_to_be(engine, replicate):
    """Four micro-batches of three blocks, an embedding, and a head with the last norm."""
    jobs = [workload(engine=engine, zero_stage=z, replicate=replicate, **FOUR) for z in (2, 3)]
    size = sum(p.numel() for p in spec_of(UNTIED).build().parameters())
    outside = sum(p.numel() for p in outside_blocks(UNTIED))
    # ZeRO-3 gathers blocks for the backward pass, too
    gathers = {2: (5, size), 3: (4 * (3 + 3 + 2), 4 * (2 * size - outside))}
    for (stage, (gathered, values)), step in zip(
        gathers.items(), count((job, 0) for job in jobs), strict=True
    ):
        result = step.collectives()
        assert result["all-gather", ("shard",), "bfloat16"] == pytest.approx(
            (gathered, 2 * values), rel=0.01
        ), stage  # odd sizes are padded
        assert result["reduce-scatter", ("shard",), "float32"] == pytest.approx(
            (4 * 5, 4 * 4 * size), rel=0.01
        )
        between = result.get(("all-reduce", ("replicate",), "float32"), (0, 0))
        assert between == pytest.approx((5, 4 * size / 2) if replicate > 1 else (0, 0), rel=0.01)


def outside_blocks(model: dict[str, Any]) -> list[torch.nn.Parameter]:
    named = spec_of(model).build().named_parameters()
    return [p for name, p in named if ".layers." not in name]


class Copied(TorchDispatchMode):
    """Counts the float32 values that are copied from one flat buffer to another."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            to, source = args[:2]
            flat = to.ndim == source.ndim == 1 and to.dtype == source.dtype == torch.float32
            self.count += source.numel() if flat and to.data_ptr() != source.data_ptr() else 0
        return function(*args, **kwargs or {})


def copied_as_reduced(case: Case) -> float:
    """Return the values that a step copies, over the model's parameters. On each rank."""
    import torch.distributed as dist

    from tests.support.training import build, collated, shares, spec_in, task_of
    from trainer.optim.lr_schedules import Update

    engine = build(case, dist.get_rank())
    batches = [collated(task_of(spec_in(case), case), rows) for rows in shares(case, 0, 0)]
    with Copied() as copied:
        engine.step(0, batches, Update(1e-2))
    engine.close()
    return copied.count / sum(p.numel() for p in spec_in(case).build().parameters())


@pytest.mark.first("mesh-2")
@pytest.mark.parametrize(("engine", "stage"), [("mesh", 2), ("mesh", 3), ("accelerate", 3)])
def test_one_rank_does_not_copy_what_it_has_reduced(pools, engine, stage):
    case = replace(MESH, engine=engine, world_size=1, zero_stage=stage, precision="bfloat16")
    [copied] = pools[1].run(copied_as_reduced, case=case)
    assert copied == 0


LOW = {"communication_data_type": "bf16"}


@pytest.mark.first("mesh-2-1")
@pytest.mark.parametrize(
    ("engine", "stage", "tensor"),
    [
        *(("mesh", 2, 1), ("mesh", 3, 1), ("accelerate", 3, 1)),
        *(("mesh", 0, 1), ("accelerate", 0, 1), ("mesh", 0, 2)),
    ],
)
def test_gradients_are_reduced_in_the_precision_that_is_asked_for(pools, engine, stage, tensor):
    model = LLAMA | ({"attention_dropout": 0.0} if tensor > 1 else {})
    sizes: Any = {"world_size": 2 * tensor, "tensor": tensor, "model": model}
    case = replace(MESH, engine=engine, zero_stage=stage, micro_batch=4, top=LOW, **sizes)
    reference = train_plainly(case)
    for outcome in pools[2 * tensor].run(train_by_engine, case=case):
        result, exact = outcome.gradients[0], reference.gradients[0]
        for name, gradient in result.items():
            assert torch.equal(gradient, gradient.bfloat16().float()), name
            assert (gradient - exact[name]).abs().max() <= 0.01 * exact[name].abs().max(), name
        assert any(not torch.equal(result[name], exact[name]) for name in result)


@pytest.mark.more
def test_replicas_reduce_each_micro_batch_where_what_is_added_up_would_be_in_low_precision():
    job = workload(zero_stage=2, replicate=2, **FOUR)
    [step] = count([(replace(job, deepspeed={**job.deepspeed, **LOW}), 0)])
    assert step.collectives()["all-reduce", ("replicate",), "bfloat16"][0] == 4 * 5


def numbers_seen(case: Case) -> list[torch.Tensor]:
    """Return the numbers beside the tokens of a batch as the task meets them in training and in
    evaluation. Runs on each rank of a pool."""
    from unittest import mock

    import torch.distributed as dist

    from tests.support.training import build
    from trainer.optim.lr_schedules import Update
    from trainer.recipes.causal_lm.task import CausalLM

    actual = []
    plain = CausalLM.loss_sum

    def noted(self: CausalLM, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        actual.append(batch["numbers"].clone())
        return plain(self, model, batch)

    engine = build(case, dist.get_rank())
    ids = torch.arange(8)[None].expand(case.micro_batch, 8) % VOCABULARY
    batch = {"input_ids": ids, "targets": ids, "lengths": torch.full((case.micro_batch, 1), 8)}
    batch["numbers"] = NUMBERS
    with mock.patch.object(CausalLM, "loss_sum", noted):
        engine.step(0, [dict(batch) for _ in range(case.accumulation)], Update(1e-2))
        engine.evaluate([batch])
    engine.close()
    return actual


NUMBERS = torch.tensor([-2387.2336, 1 / 3, 1e-9], dtype=torch.float64)


@pytest.mark.first("mesh-3-1")
@pytest.mark.parametrize(
    ("engine", "stage", "pipeline"),
    [("mesh", 3, 1), ("mesh", 2, 1), ("accelerate", 3, 1), ("deepspeed", 3, 1), ("mesh", 2, 2)],
)
def test_the_numbers_of_a_batch_are_not_rounded_to_the_models_precision(
    pools, engine, stage, pipeline
):
    """A reference of -2387.2 would be -2384 in bfloat16, and a pair weigh otherwise."""
    more: Any = {"precision": "bfloat16", "zero_stage": stage, "pipeline": pipeline}
    case = replace(MESH, engine=engine, world_size=2 * pipeline, **more)
    actual = [one for rank in pools[2 * pipeline].run(numbers_seen, case=case) for one in rank]
    assert len(actual) >= 2 * (case.accumulation + 1)
    assert all(torch.equal(one, NUMBERS) for one in actual)
