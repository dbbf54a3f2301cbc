"""The resolved JSON as DeepSpeed gets it on this machine; shared by its engine with and without a pipeline."""

from __future__ import annotations

from typing import Any

import torch

from trainer.engines.engine import Job
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.optim.support import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

STAGE_0_NOTE = (
    "ZeRO-0 in {} runs as ZeRO-1, with the same gradients and less memory: DeepSpeed's own path for float16 divides "
    "gradients by a loss scale that it never applied"
)


def check_precision(layout: Layout) -> None:
    """Raise ConfigError if this machine can't compute in the layout's precision."""
    from deepspeed.accelerator import get_accelerator

    if layout.precision == "float16" and not get_accelerator().is_fp16_supported():
        seen = "true on a processor without float16 arithmetic"
        expected = "a GPU, or a processor with AVX512-FP16 or AMX"
        raise ConfigError(Problem("fp16.enabled", seen, expected, 'Set bf16.enabled, or trainer.device="cuda"'))


def has_plain_optimizer(layout: Layout) -> bool:
    """Return True without ZeRO in float32: DeepSpeed then steps PyTorch's optimizer itself, unwrapped."""
    return layout.zero_stage == 0 and layout.precision == "float32"


def runtime_config(job: Job, recipe: Recipe) -> dict[str, Any]:
    """Return the resolved JSON as this machine needs it; no change here affects what is computed."""
    config = {**job.deepspeed, "steps_per_print": 2**31 - 1}
    kind, given = config["optimizer"]["type"], config["optimizer"]["params"]
    params = dict(recipe.params)
    if kind in ("Adam", "AdamW"):
        # PyTorch's own fused kernel: the same update as DeepSpeed's FusedAdam, without a compiler at run time
        params |= {"adam_w_mode": given.get("adam_w_mode", True), "torch_adam": recipe.library.startswith("torch.")}
    config["optimizer"] = {"type": kind, "params": params}
    if job.layout.zero_stage == 3 and job.layout.recompute.mode == "selective":
        # its linear layer adds the bias in place to the saved product: recomputed, it would be added twice
        config["zero_optimization"] = {**config["zero_optimization"], "memory_efficient_linear": False}
    if has_plain_optimizer(job.layout):
        # DeepSpeed reports no norm here, so this engine computes it and clips
        config["gradient_clipping"] = 0.0
    elif job.layout.zero_stage == 0:
        config["zero_allow_untested_optimizer"] = True  # does not apply without ZeRO
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": 1}
    return config
