"""Context parallelism: parts of sequences, the kernels that attend, positions that grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.layouts import TIED, family
from tests.support.training import Case, spec_in, task_of
from trainer.distributed.context_ranks import Division

CONTEXT = Case(context=2, micro_batch=4, model=TIED)
SINKS = family("gpt_oss", sliding_window=4, num_local_experts=4, num_experts_per_tok=2)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 70))
def test_parts_are_a_row_and_groups_attend_to_as_many_tokens(inside, groups, length):
    division = Division(inside * groups, groups)
    row = torch.arange(1, length + 1)[None]
    parts = [division.part(row, rank) for rank in range(division.size)]
    assert len({part.shape for part in parts}) == 1
    whole = torch.cat(parts, 1)
    if groups > 1:
        whole = division.in_order(whole, 1)
    filled = division.filled(length)
    assert whole.shape[1] == filled < length + 2 * division.size
    assert torch.equal(whole[:, :length], row) and not whole[:, length:].any()
    actual = [
        sum(sum(range(at + 1, end + 1)) for at, end in division.sections(rank, filled))
        for rank in range(0, division.size, inside)
    ]
    assert groups == 1 or len(set(actual)) == 1


def gradients(case: Case) -> dict[str, torch.Tensor]:
    """Train a step on packed sequences of an odd length. Runs on each rank of a pool."""
    import torch.distributed as dist

    from tests.support.training import build
    from trainer.optim.lr_schedules import Update
    from trainer.probes.inputs import packed_batch

    engine, result = build(case, dist.get_rank(), packs=True), {}
    batch = packed_batch(spec_in(case), task_of(spec_in(case), case))
    assert batch["input_ids"].shape[1] % 2 == 1
    metrics = engine.step(
        0, [batch], Update(1e-2), lambda name, g: result.update({name: g.clone()})
    )
    result["loss"] = metrics.loss()
    engine.close()
    return result


@pytest.mark.first("window-mesh", "dropout-deepspeed", "three kv heads-mesh")
@pytest.mark.parametrize("engine", ["mesh", "deepspeed"])
@pytest.mark.parametrize(
    "model",
    [
        TIED,
        family("phi3", resid_pdrop=0.1, embd_pdrop=0.1),
        family("mistral", sliding_window=4),
        TIED | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
        TIED | {"num_key_value_heads": 1},
        SINKS,
    ],
    ids=["llama", "dropout", "window", "three kv heads", "one kv head", "sinks"],
)
def test_packed_rows_are_apart_across_the_ranks(pools, engine, model):
    case = replace(CONTEXT, engine=engine, model=model, zero_stage=2, neftune_alpha=5.0)
    case = replace(case, micro_batch=8)
    alone = pools[1].run(gradients, case=replace(case, world_size=1, context=1))[0]
    for result in pools[2].run(gradients, case=case):
        assert result.keys() == alone.keys()
        for name, value in alone.items():
            assert float((result[name] - value).abs().max() / value.abs().max()) < 5e-6, name


ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}


def by_kernel(case: Case, kernel: str) -> dict[str, torch.Tensor]:
    """Return the gradients by a GPU's kernel, on this CPU. Runs on each rank of a pool."""
    from tests.support.varlen import on_cpu

    chooser = "trainer.recipes.causal_lm.task.kernel_chooser"
    with on_cpu(), patch(chooser, lambda *_: lambda *_: kernel):
        return gradients(case)


@pytest.mark.first("sinks-mask", "window-cu_seqlens", "three heads-blocks")
@pytest.mark.parametrize("kernel", ["mask", "cu_seqlens", "blocks"])
@pytest.mark.parametrize(
    "model",
    [
        TIED | ONE_HEAD,
        family("mistral", sliding_window=4) | ONE_HEAD,
        TIED | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
        SINKS | ONE_HEAD,
    ],
    ids=["one head", "window", "three heads", "sinks"],
)
def test_sections_of_packed_rows_see_their_own_documents(pools, kernel, model):
    """With fewer heads than ranks each has two sections of a row, and gathers keys and values."""
    if model["model_type"] == "gpt_oss" and kernel == "cu_seqlens":
        pytest.skip("it is never chosen for sinks")
    case = replace(CONTEXT, engine="mesh", zero_stage=2, micro_batch=8, model=model)
    alone = pools[1].run(gradients, case=replace(case, world_size=1, context=1))[0]
    for result in pools[2].run(by_kernel, case=case, kernel=kernel):
        for name, value in alone.items():
            assert float((result[name] - value).abs().max() / value.abs().max()) < 5e-6, name


@pytest.mark.parametrize("groups", [1, 2])
def test_a_kernel_is_tested_as_it_will_run(groups):
    """Every copy of a task asks with its own ranks, the one with noise that is trained, too."""
    import trainer.recipes.causal_lm.task as causal_lm
    from trainer.distributed.context_ranks import ContextRanks
    from trainer.tasks import kernels

    spec = spec_in(CONTEXT)
    plain = task_of(spec, CONTEXT).packing()
    task = plain.regularised(spec, 0.1, 5.0)
    model = task.prepare(spec.build().to_empty(device="cpu"))
    task.placed(ContextRanks(Division(2, groups), None, None))
    requests: list[bool] = []

    def tested(model: Any, pattern: str, dtype: Any, device: Any, divided: bool) -> Any:
        requests.append(divided)
        return "mask", ""

    row = torch.zeros(1, 8, dtype=torch.int64)
    batch = {"input_ids": row, "targets": row, "documents": torch.tensor([[3, 5]])}

    def on_gpu(attention: Any, device: torch.device, ranks: Any) -> Any:
        return kernels.kernel_chooser(attention, torch.device("cuda"), ranks)

    with (
        patch.object(kernels, "tested", tested),
        patch.object(causal_lm, "kernel_chooser", on_gpu),
    ):
        task.loss_sum(model, batch | {"lengths": torch.tensor([[8]])})
    assert requests == [groups > 1]


@pytest.mark.parametrize("dividing", [True, False], ids=["divided", "not divided"])
def test_rotary_embeddings_grow_by_the_row(pools, dividing):
    """Without the row's length, the first rank would compute other ones than the last."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = TIED | {"max_position_embeddings": 8, "rope_parameters": rope}
    case = replace(CONTEXT, engine="mesh", model=model, micro_batch=8)
    alone = pools[1].run(gradients, case=replace(case, world_size=1, context=1))[0]
    name = "model.layers.0.self_attn.q_proj.weight"
    function = gradients if dividing else _without_growth
    for result in pools[2].run(function, case=case):
        error = float((result[name] - alone[name]).abs().max() / alone[name].abs().max())
        assert (error < 5e-6) == dividing


def _without_growth(case: Case) -> dict[str, torch.Tensor]:
    with patch("trainer.tasks.patches.GROWING", set()):
        return gradients(case)
