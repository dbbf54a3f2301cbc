"""The engine that "auto" takes: on a GPU the one that compiles blocks, if no key needs DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.messages import raises
from tests.support.training import GPT2, spec_of
from trainer.config import RuntimeFacts, load
from trainer.errors import ConfigError
from trainer.run.compose import Composed, compose
from trainer.run.engine_choice import choice_of, faster, kept

OWN_KEY = "zero_optimization.stage3_max_live_parameters=1000"
AS_IN_TRANSFORMERS = [
    f"zero_optimization.{key}"
    for key in (
        "overlap_comm=true",
        "contiguous_gradients=true",
        "sub_group_size=1e9",
        "reduce_bucket_size=auto",
        "stage3_prefetch_bucket_size=auto",
        "stage3_param_persistence_threshold=auto",
        "stage3_max_live_parameters=1e9",
        "stage3_max_reuse_distance=1e9",
        "stage3_gather_16bit_weights_on_model_save=true",
    )
]
"""Keys of the ZeRO-3 config in transformers' documentation: DeepSpeed's defaults."""
OFFLOADED = 'zero_optimization.offload_optimizer={"device": "cpu"}'


def composed(config: str, *overrides: str, device: Any = "cuda") -> Composed:
    facts = RuntimeFacts(4, 64, 100, True, device, 2)
    return compose(
        load(config, ["train_batch_size=64", "gradient_accumulation_steps=auto", *overrides]), facts
    )


@pytest.mark.parametrize(
    ("config", "overrides", "device", "taken", "noted"),
    [
        ("zero3", [], "cuda", "mesh", False),
        ("zero2", [], "cuda", "deepspeed", False),
        ("hsdp", [], "cuda", "accelerate", False),
        ("zero3", [], "cpu", "deepspeed", False),
        ("zero3", [OWN_KEY], "cuda", "deepspeed", True),
        ("zero3", [OFFLOADED], "cuda", "deepspeed", False),
        ("zero3", AS_IN_TRANSFORMERS, "cuda", "mesh", False),
        ("zero3", ["trainer.compile=none"], "cuda", "deepspeed", False),
        ("zero3", ["trainer.activation_checkpointing=offload"], "cuda", "deepspeed", False),
        ("zero3", ["fp16.enabled=true", "bf16.enabled=false"], "cuda", "deepspeed", False),
        ("zero3", ["trainer.engine=deepspeed"], "cuda", "deepspeed", False),
        ("zero3", ["trainer.engine=accelerate"], "cuda", "accelerate", False),
    ],
)
def test_a_plain_json_on_a_gpu_gets_an_engine_that_compiles(
    config: str, overrides: list[str], device: Any, taken: str, noted: bool
) -> None:
    asked = composed(config, *overrides, device=device)
    choice = choice_of(asked, None)
    assert choice.name == taken
    assert bool(choice.reason) == (taken == "mesh")
    assert bool(list(faster(asked, choice.name))) == noted


@pytest.mark.parametrize(
    ("earlier", "overrides", "taken"),
    [
        ("deepspeed", [], "deepspeed"),
        ("accelerate", [], "accelerate"),
        ("deepspeed", ["trainer.engine=mesh"], "mesh"),
        ("accelerate", ["pipeline.stages=2"], "mesh"),
        ("another", [], "mesh"),
        (["deepspeed"], [], "mesh"),
    ],
)
def test_a_run_keeps_its_engine_if_it_can(earlier: Any, overrides: list[str], taken: str) -> None:
    asked = composed("zero3", *overrides)
    choice = choice_of(asked, kept(asked, earlier))
    assert choice.name == taken
    assert not (choice.reason and taken == earlier)


def test_a_model_that_mesh_cannot_train_gets_deepspeed() -> None:
    """Zamba's blocks share parameters: FSDP2 can't gather them one by one."""
    shared = spec_of({"model_type": "zamba2"}).tiny.copy()
    choice = choice_of(composed("zero3"), None, shared)
    assert (choice.name, bool(choice.reason)) == ("deepspeed", True)
    assert choice_of(composed("zero3"), None, spec_of(GPT2)).name == "mesh"
    with raises(ConfigError, "FSDP2 shards block", "model.layers"):
        choice_of(composed("zero3", "trainer.engine=mesh"), None, shared)
