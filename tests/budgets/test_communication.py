"""What a step sends, host reads and the order of messages, counted on fake ranks.

The formulas are in `tests/support/budget.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.support.budget import AFTER, BEFORE, Levers, expected, sizes_of
from tests.support.counted import Step, count, workload
from tests.support.warm import PRELOADED

TINY: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    tie_word_embeddings=False,
)
LLAMA = {"model_type": "llama", **TINY}
TIED = LLAMA | {"tie_word_embeddings": True}
MOE = TINY | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SLIDING = {"model_type": "mistral", "sliding_window": 8, **TINY}

more = pytest.mark.more
HALF = {"precision": "bfloat16"}
HSDP = {**HALF, "replicate": 2, "shard": 4}
# by hand, one parameter at a time: prefetching joins messages by sizes of buckets
ONE_BY_ONE = {
    "zero_optimization": {
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    }
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": dict(replicate=8),
    "zero1": dict(zero_stage=1, shard=8, **HALF),
    "zero2": dict(zero_stage=2, shard=8, **HALF),
    "zero3": dict(zero_stage=3, shard=8, **HALF),
    "zero3, tied": dict(zero_stage=3, shard=8, model=TIED, **HALF),
    "zero3, moe": dict(zero_stage=3, shard=8, model=MOE, **HALF),
    "zero3, sliding": dict(zero_stage=3, shard=8, model=SLIDING, **HALF),
    "hsdp, zero2": dict(zero_stage=2, **HSDP),
    "hsdp, zero3": dict(zero_stage=3, **HSDP),
    "pipeline": dict(pipeline=2),
    "pipeline, tied": dict(pipeline=2, model=TIED),
    "pipeline x ddp": dict(pipeline=2, replicate=2),
    "pipeline x zero1": dict(pipeline=2, zero_stage=1, shard=2),
    "pipeline x zero2": dict(pipeline=2, zero_stage=2, shard=2, **HALF),
    "pipeline x zero3": dict(pipeline=2, zero_stage=3, shard=2, **HALF),
    "pipeline x hsdp": dict(pipeline=2, zero_stage=3, **HSDP),
    "tensor": dict(tensor=4),
    "tensor x ddp": dict(tensor=2, replicate=2),
    "tensor x zero1": dict(tensor=2, zero_stage=1, shard=2, **HALF),
    "tensor x zero2": dict(tensor=2, zero_stage=2, shard=2, **HALF),
    "tensor x zero3": dict(tensor=2, zero_stage=3, shard=2, **HALF),
    "tensor x hsdp": dict(tensor=2, zero_stage=3, **HSDP),
    "pipeline x tensor": dict(pipeline=2, tensor=2),
    "pipeline x tensor x zero3": dict(pipeline=2, tensor=2, zero_stage=3, shard=2, **HALF),
}


def offered() -> dict[str, dict[str, Any]]:
    """Every layout with one and four micro-batches, under each engine that offers it."""
    from trainer.engines import ENGINES

    found = {}
    for engine in ENGINES:
        for name, case in CASES.items():
            for m in (1, 4):
                try:
                    job = {"model": LLAMA, **case, "engine": engine, "accumulation": m}
                    if engine == "deepspeed" and case.get("zero_stage") == 3:
                        job["more"] = ONE_BY_ONE
                    workload(**job)
                except Exception:
                    continue
                found[f"{engine}-{name}-{m}"] = job
    return found
