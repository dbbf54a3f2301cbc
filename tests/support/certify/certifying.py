"""A tiny config, and its certificate on each rank of a pool, with or without a fault."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.pool import machine_here
from tests.support.training import GPT2
from trainer.certify.tiny_run import tiny_run


def config(
    folder: Path,
    engine: str,
    stage: int,
    stages: int = 1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    **trainer: Any,
) -> str:
    """GPT-2: dropout in three places, tied, biases; in so many pipeline stages, on so many ranks
    that divide matrices, rows, or experts.
    """
    content = {
        "train_batch_size": 64,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": stages},
        "tensor_parallel": {"autotp_size": tensor},
        "sequence_parallel_size": context,
        "expert_parallel": {"enabled": expert > 1, "autoep_size": expert},
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 5, "warmup_max_lr": "auto"},
        },
        "trainer": {"engine": engine, "model": {"config": GPT2 | {"n_layer": 6}}, **trainer},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Has a buffer that persists: the correction of its router's bias."""
BALANCED = {
    "model": {"config": DEEPSEEK | {"vocab_size": 61, "n_group": 1, "num_experts_per_tok": 2}},
    "data": {"sequence_length": 28},
    "router_bias_update_rate": 0.01,
}
SPREAD = {
    "expert": 2,
    "model": {"config": {"model_type": "qwen3_moe", "num_hidden_layers": 2, "vocab_size": 61}},
}
MISTRAL = {"model_type": "mistral", "num_hidden_layers": 2, "vocab_size": 61, "sliding_window": 32}


def certified(
    path: str,
    world_size: int,
    fault: Callable[[str], Any] | None = None,
    overrides: Sequence[str] = (),
    precision: str = "float32",
    probes: bool = False,
) -> tuple[bool, str, str]:
    """Runs on each rank: whether it passed, the first check that failed, and the table.

    `probes`: those before the run do not find the fault.
    """

    from trainer.certify import certificate as module
    from trainer.certify.certificate import certify, table

    small = tiny_run(path, list(overrides), world_size, precision)
    with contextlib.ExitStack() as stack:
        if fault and not probes:
            # the checks at start find some of these faults, too; here the certificate is to
            stack.enter_context(mock.patch.object(module, "checked", lambda spec, *_: (spec, ())))
        if fault:
            stack.enter_context(fault(small.config.trainer.engine))
        certificate = certify(small, machine_here())
    first = certificate.first_failure
    return certificate.passed, first.check if first else "", table(certificate)
