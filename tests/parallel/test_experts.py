"""Expert parallelism: ranks that do not divide, keys, ranks without tokens, resuming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.conformance.resuming import all_to_all, ring
from tests.support.layouts import EXPERTS
from tests.support.messages import raises
from tests.support.parallel.routed import DEEPSEEK, GPT_OSS, SPREAD
from tests.support.training import assert_same, layout_of, spec_in, train_by_engine
from trainer.config import load, mesh_sizes
from trainer.engines.deepspeed.engine import KIND
from trainer.errors import ConfigError
from trainer.parallel.splits import expert_ranks


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["expert_parallel.autoep_size=3"],
            ("4 (shard) x 1 (tensor)", "not divisible", "multiple of 3", "3 or 6"),
        ),
        (["zero_optimization.stage=0"], ("1 (shard) x 1 (tensor)", "not divisible")),
        (
            ["expert_parallel.autoep_size=2", "tensor_parallel.autotp_size=4"],
            ("no multiple of 4", "expected a multiple of 4"),
        ),
    ],
)
def test_ranks_that_do_not_divide_are_one_sentence(overrides, keys):
    with raises(ConfigError, *keys) as error:
        mesh_sizes(load("experts", overrides), 4)
    assert str(error.value).startswith("expert_parallel.autoep_size")


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("top_k=4", ("own config", "tokens are routed")),
        ("load_balance_coeff=0.1", ("Set trainer.router_bias_update_rate",)),
        ("expert_tensor_parallel_size=2", ("whole on a rank",)),
    ],
)
def test_a_key_that_would_change_the_routing_is_refused(key, keys):
    with raises(ConfigError, *keys):
        load("experts", [f"expert_parallel.{key}"])


def gradients_of_routed(chosen: list[list[list[int]]]) -> list[dict[str, torch.Tensor]]:
    """Return what a stack of experts gives and its gradients, on ranks and whole.

    `chosen`: each rank's tokens' experts. Runs on each rank.
    """
    import torch.distributed as dist

    from trainer.distributed.exchange import Exchange
    from trainer.probes.probe import drawn

    model = drawn(spec_in(SPREAD))
    rank, size = dist.get_rank(), dist.get_world_size()
    stack: Any = model.get_submodule("model.layers.0.mlp.experts")
    whole: Any = drawn(spec_in(SPREAD)).get_submodule("model.layers.0.mlp.experts")

    def part(parameter: torch.nn.Parameter, dim: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(parameter.data.chunk(size, dim)[rank].clone())

    expert_ranks.spread(stack, Exchange(dist.group.WORLD), part, None)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randn(len(of), 32, generator=generator) for of in chosen]
    results = []
    for experts, mine in (stack, [rank]), (whole, range(size)):
        hidden = torch.cat([tokens[r] for r in mine]).requires_grad_()
        numbers = torch.tensor([token for r in mine for token in chosen[r]], dtype=torch.long).view(
            -1, 2
        )
        weights = torch.full(numbers.shape, 0.5, requires_grad=True)
        output = experts(hidden, numbers, weights)
        output.square().sum().backward()
        own = {name: p.grad for name, p in experts.named_parameters()}
        assert all(gradient is not None for gradient in own.values())
        results.append({"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad})
        results[-1] |= own
    start = sum(map(len, chosen[:rank]))
    for name in "output", "hidden", "weights":
        results[1][name] = results[1][name][start : start + len(chosen[rank])]
    for name in own:
        results[1][name] = results[1][name].chunk(size)[rank]
    return results


@pytest.mark.first("an idle rank")
@pytest.mark.parametrize(
    "chosen",
    [
        [[[0, 1], [1, 0], [0, 1]], [[1, 0]]],
        [[[2, 3]], []],
        [[[0, 2], [3, 1]], [[3, 2], [0, 1], [1, 3]]],
    ],
    ids=["an idle rank", "a rank without tokens", "all"],
)
def test_a_rank_without_tokens_takes_part(pools, chosen):
    for ours, whole in pools[2].run(gradients_of_routed, chosen=chosen):
        assert ours.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(ours[name], value, rtol=2e-6, atol=1e-7, msg=name)


LORA = {"r": 2, "alpha": 4}


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "adapter"),
    [(DEEPSEEK, None), (GPT_OSS, None), (EXPERTS, LORA)],
    ids=["deepseek_v3", "gpt_oss", "an adapter beside experts"],
)
def test_it_trains_as_on_one_rank(pools, model, adapter):
    case = replace(SPREAD, model=model, zero_stage=3, adapter=adapter)
    alone = replace(case, world_size=1, expert=1)
    [reference] = pools[1].run(train_by_engine, case=alone)
    for outcome in pools[2].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-5)


NEWEST = pytest.mark.skipif(
    KIND.refusal(layout_of(replace(SPREAD, engine="deepspeed"))) is not None,
    reason="older versions of DeepSpeed spread no experts",
)
STAGES = replace(SPREAD, engine="deepspeed", world_size=4, pipeline=2, zero_stage=1, model=DEEPSEEK)


@NEWEST
def test_a_pipeline_stage_without_experts_is_refused_where_norms_would_wait_for_it(pools):
    model = DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    with raises(AssertionError, "of 2, 3 parameter", "groups"):
        pools[4].run(train_by_engine, case=replace(STAGES, model=model))


@pytest.mark.parametrize("key", ["contiguous_gradients", "reduce_scatter"])
def test_what_deepspeed_asserts_with_experts_is_refused_in_words(key):
    case = replace(SPREAD, engine="deepspeed")
    settings = case.deepspeed() | {"zero_optimization": {"stage": 2, key: False}}
    with pytest.raises(ConfigError, match=f"zero_optimization.{key}: false; expected true"):
        KIND.ready(layout_of(case), torch.device("cpu"), settings)


CASES = {
    "whole": replace(SPREAD, world_size=1, expert=1, zero_stage=0),
    "2 of 2": replace(SPREAD, world_size=2),
    "2 of 4": replace(SPREAD, world_size=4, zero_stage=3),
    "4 of 4": replace(SPREAD, world_size=4, expert=4, zero_stage=3),
    "deepspeed zero3": replace(SPREAD, engine="deepspeed", world_size=4, zero_stage=3),
    "hsdp": replace(SPREAD, world_size=4, replicate=2),
    "deepspeed zero2": replace(SPREAD, engine="deepspeed", world_size=4),
}


@pytest.mark.more
@NEWEST
@pytest.mark.parametrize("step", [1, 2])
def test_experts_go_on_on_another_number_of_ranks(pools, tmp_path, step):
    table = all_to_all(pools, tmp_path, ring(list(CASES), step), CASES)
    assert all(error <= 1e-5 for row in table.values() for error in row.values()), table
