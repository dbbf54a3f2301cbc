"""Adapters on stacks of experts train as PEFT does in one process, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.certify.certifying import certified, config

STACKS = {"r": 4, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "mesh-ddp": {"engine": "mesh", "stage": 0},
    "mesh-zero2": {"engine": "mesh", "stage": 2},
    "mesh-zero3": {"engine": "mesh", "stage": 3},
    "accelerate-fsdp": {"engine": "accelerate", "stage": 3},
    "deepspeed-zero2": {"engine": "deepspeed", "stage": 2},
    "deepspeed-zero3": {"engine": "deepspeed", "stage": 3},
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
    """Folders with architectures whose experts are stacked."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    folders: dict[str, Path] = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in folders.items():
        AutoConfig.for_model(name, **sizes, **FAMILIES[name]).save_pretrained(folder)
    return {name: str(folder) for name, folder in folders.items()}


@pytest.mark.more
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapted_experts_are_those_of_one_process(pools, tmp_path, bases, layout, family):
    adapter = {"adapter": STACKS, "model": {"name_or_path": bases[family]}}
    path = config(tmp_path, **(adapter | LAYOUTS[layout]))
    for passed, _, table in pools[2].run(certified, path=path, world_size=2):
        assert passed, table
