"""Adapters on stacks of experts train as PEFT does in one process, under every layout."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.certify.certifying import certified, config
from tests.support.commands import run
from tests.support.models.routed import FAMILIES, write_routed
from trainer.models.finetuning import lora_experts, lora_weights

STACKS = {"r": 4, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
OFFLOAD = (
    "zero_optimization.offload_optimizer.device=cpu",
    "zero_optimization.offload_param.device=cpu",
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "mesh-ddp": {"engine": "mesh", "stage": 0},
    "mesh-zero2": {"engine": "mesh", "stage": 2},
    "mesh-zero3": {"engine": "mesh", "stage": 3},
    "accelerate-fsdp": {"engine": "accelerate", "stage": 3},
    "deepspeed-zero2": {"engine": "deepspeed", "stage": 2},
    "deepspeed-zero3": {"engine": "deepspeed", "stage": 3},
    "deepspeed-zero3, offload, full": {
        **{"engine": "deepspeed", "stage": 3, "activation_checkpointing": "full"},
        "offload": True,
    },
    "pipeline-zero2": {"engine": "mesh", "stage": 2, "stages": 2},
    "context-zero3": {"engine": "mesh", "stage": 3, "context": 2},
    "tensor": {"engine": "mesh", "stage": 0, "tensor": 2},
    "mesh-zero3, experts": {"engine": "mesh", "stage": 3, "expert": 2},
    "mesh-zero2, experts, full": {
        **{"engine": "mesh", "stage": 2, "expert": 2},
        "activation_checkpointing": "full",
    },
    "deepspeed-zero2, experts": {"engine": "deepspeed", "stage": 2, "expert": 2},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: Any) -> dict[str, str]:
    return write_routed(tmp_path_factory.mktemp)


@pytest.mark.more
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapted_experts_are_those_of_one_process(pools, tmp_path, bases, layout, family):
    case = {"adapter": STACKS, "model": {"name_or_path": bases[family]}} | LAYOUTS[layout]
    offload = OFFLOAD if case.pop("offload", False) else ()
    path = config(tmp_path, **case)
    for passed, _, table in pools[2].run(certified, path=path, world_size=2, overrides=offload):
        assert passed, table


ON_FOUR_RANKS: dict[str, dict[str, Any]] = {
    "hsdp": {"stage": 3, "mesh": {"shard": 2}},
    "hsdp, experts": {"stage": 3, "mesh": {"shard": 2}, "expert": 2},
    "pipeline-zero2, experts": {"stage": 2, "stages": 2, "expert": 2},
    "tensor-zero3, experts": {"stage": 3, "tensor": 2, "expert": 2},
}


@pytest.mark.more
@pytest.mark.parametrize("layout", ON_FOUR_RANKS)
def test_adapted_experts_on_four_ranks(pools, tmp_path, bases, layout):
    given = {"adapter": STACKS, "model": {"name_or_path": bases["qwen3_moe"]}}
    path = config(tmp_path, "mesh", **given, **ON_FOUR_RANKS[layout])
    for passed, _, table in pools[4].run(certified, path=path, world_size=4):
        assert passed, table


IN_FOUR_BITS = STACKS | {"quantize": {"double_quant": True}}


@pytest.mark.more
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["deepspeed-zero3", "mesh-zero3, experts", "tensor"])
def test_adapted_experts_in_four_bits(pools, tmp_path, bases, layout, family):
    adapter = {"adapter": IN_FOUR_BITS, "model": {"name_or_path": bases[family]}}
    path = config(tmp_path, **(adapter | LAYOUTS[layout]))
    for passed, _, table in pools[2].run(certified, path=path, world_size=2):
        assert passed, table


@pytest.mark.more
@pytest.mark.parametrize("layout", ["deepspeed-zero3", "mesh-zero2"])
def test_adapted_experts_in_the_configs_precision(pools, tmp_path, bases, layout):
    adapter = {"adapter": STACKS | {"merge": True}, "model": {"name_or_path": bases["qwen3_moe"]}}
    path = config(tmp_path, **(adapter | LAYOUTS[layout]))
    overrides = ["bf16.enabled=true", "optimizer.params.lr=1e-5"]
    arguments = {"world_size": 2, "overrides": overrides, "precision": "config"}
    for passed, _, table in pools[2].run(certified, path=path, **arguments):
        assert passed, table
        assert "bfloat16" in table and "merged " in table


@pytest.mark.more
def test_adapted_experts_in_compiled_blocks(tmp_path, bases):
    adapter = {"adapter": STACKS, "model": {"name_or_path": bases["qwen3_moe"]}}
    path = config(tmp_path, "mesh", 2, **adapter)
    out = tmp_path / "certificate.json"
    words = "--config", path, "--compile", "--world-size", "2", "--output", out
    result = run("meshloom", "verify", *words)
    assert result.code == 0, result.output
    assert "compiled blocks" in result.output and "uncompiled" not in result.output


def the_next_experts_adapter(engine: str) -> Any:
    real = lora_weights.factors

    def factors(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = real(*args)
        return left.roll(1, 0), right.roll(1, 0)

    return mock.patch.object(lora_experts, "factors", factors)


def the_first_experts_adapter(engine: str) -> Any:
    """Each rank takes the adapter of the first experts, as if it had no others."""
    real = lora_weights.factors

    def factors(module: Any, first: Any, second: Any, experts: slice) -> Any:
        return real(module, first, second, slice(0, experts.stop - experts.start))

    return mock.patch.object(lora_experts, "factors", factors)


def one_merged_stack_is_the_base(engine: str) -> Any:
    real = lora_weights.MergedWeights.read

    def read(weights: Any, name: str) -> torch.Tensor | None:
        if name.endswith("experts.down_proj"):
            return weights.base.read(name)  # type: ignore[no-any-return]
        return real(weights, name)

    return mock.patch.object(lora_weights.MergedWeights, "read", read)


FAULTS = {the_next_experts_adapter: "gradient", one_merged_stack_is_the_base: "merged"}


@pytest.mark.more
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_an_experts_adapter_is_caught(pools, tmp_path, bases, fault):
    adapter = STACKS | {"merge": True}
    path = config(tmp_path, "mesh", 3, adapter=adapter, model={"name_or_path": bases["qwen3_moe"]})
    for passed, first, table in pools[2].run(certified, path=path, world_size=2, fault=fault):
        assert not passed and first == FAULTS[fault], table


@pytest.mark.more
def test_adapters_of_another_ranks_experts_are_seen_at_the_start(pools, tmp_path, bases):
    given = {"adapter": STACKS, "model": {"name_or_path": bases["qwen3_moe"]}}
    path = config(tmp_path, "mesh", 3, expert=2, **given)
    fault = the_first_experts_adapter
    with pytest.raises(AssertionError, match="ConfigError.*experts.base_layer.base_layer"):
        pools[2].run(certified, path=path, world_size=2, fault=fault)
