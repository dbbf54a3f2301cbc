"""DeepSpeed on this machine: the JSON as it gets it, and operators compiled at their first use."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.engines.engine import Job, Machine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.optim.builders import Builder
from trainer.storage import Json, imported

OF_OPTIMIZERS = {
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "cpu_adam",
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad": "cpu_adagrad",
    "deepspeed.ops.lion.DeepSpeedCPULion": "cpu_lion",
    "deepspeed.ops.adam.FusedAdam": "fused_adam",
    "deepspeed.ops.lion.FusedLion": "fused_lion",
}
"""DeepSpeed's operators by optimizer class; those without `fused` run on the host."""

STAGE_0_NOTE = (
    "ZeRO-0 in {} runs as ZeRO-1, with the same gradients and less memory: DeepSpeed's own path "
    "for float16 divides gradients by a loss scale that it never applied"
)


def check_precision(layout: Layout) -> None:
    """Raise ConfigError if this machine can't compute in the layout's precision."""
    get_accelerator = imported("deepspeed.accelerator", "engine deepspeed").get_accelerator
    if layout.precision == "float16" and not get_accelerator().is_fp16_supported():
        actual = "true on a processor without float16 arithmetic"
        expected = "a GPU, or a processor with AVX512-FP16 or AMX"
        hint = 'Set bf16.enabled, or trainer.device="cuda"'
        raise ConfigError(Problem("fp16.enabled", actual, expected, hint))


def has_plain_optimizer(layout: Layout) -> bool:
    """Return True if DeepSpeed steps PyTorch's optimizer itself: without ZeRO, in float32."""
    return layout.zero_stage == 0 and layout.precision == "float32"


def runtime_config(job: Job, builder: Builder) -> Json:
    """Return the resolved JSON as this machine needs it, with the same numerical results."""
    config = {**job.deepspeed, "steps_per_print": 2**31 - 1}
    # to DeepSpeed the ranks that share rows are ranks as all are: they average gradients
    config.pop("sequence_parallel_size", None)
    config.pop("expert_parallel", None)  # it would replace layers
    config["train_batch_size"] *= job.layout.context
    kind = config["optimizer"]["type"]
    given = config["optimizer"]["params"]
    params = dict(builder.params)
    if kind in ("Adam", "AdamW"):
        # PyTorch's fused kernel makes FusedAdam's update without a compiler at run time
        params["adam_w_mode"] = given.get("adam_w_mode", True)
        params["torch_adam"] = builder.library.startswith("torch.")
    config["optimizer"] = {"type": kind, "params": params}
    if has_plain_optimizer(job.layout):
        # DeepSpeed reports no norm here, so this engine computes it and clips
        config["gradient_clipping"] = 0.0
    elif job.layout.zero_stage == 0:
        config["zero_allow_untested_optimizer"] = True  # does not apply without ZeRO
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": 1}
    return config


def check_compiler(layout: Layout, device: torch.device, optimizer: str = "") -> None:
    """Raise ConfigError if an operator has to be compiled and a tool for it is missing.

    `optimizer`: the class that the engine builds, by its public name.
    """
    from torch.utils.cpp_extension import CUDA_HOME, get_cxx_compiler

    for name in _missing(layout, device, optimizer):
        tools = [(get_cxx_compiler(), "g++"), ("ninja", "ninja-build")]
        if device.type == "cuda" and name.startswith("fused"):
            tools.append((f"{CUDA_HOME}/bin/nvcc" if CUDA_HOME else "nvcc", "nvidia-cuda-toolkit"))
        for tool, package in tools:
            if shutil.which(tool) is None:
                actual = f"no {tool} in PATH, by which DeepSpeed compiles its operator {name}"
                cuda = " and CUDA's nvcc" if len(tools) > 2 else ""
                expected = f"a C++ compiler and ninja{cuda}"
                engines = 'set trainer.engine to "mesh" or "accelerate"'
                hint = f"Install it (apt install {package}), or {engines}"
                raise ConfigError(Problem("engine deepspeed", actual, expected, hint))


def announce(layout: Layout, machine: Machine, optimizer: str = "") -> None:
    """Tell the user which operators are about to be compiled."""
    if names := list(_missing(layout, machine.device, optimizer)):
        operators = f"operator{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        text = f"compiling DeepSpeed's {operators}, once for this environment: it may take minutes"
        machine.signs.at(text, stays=True)


def _missing(layout: Layout, device: torch.device, optimizer: str) -> Iterator[str]:
    from deepspeed.git_version_info import accelerator_name, installed_ops
    from deepspeed.ops import __compatible_ops__ as compatible
    from torch.utils.cpp_extension import _get_build_directory

    nvme = "nvme" in (layout.offload_optimizer, layout.offload_param)
    used = ["pin_memory", "async_io"] if nvme else []  # the first is loaded by the second
    names = [name for name in used if compatible.get(name)]
    if optimizer in OF_OPTIMIZERS:
        names.append(OF_OPTIMIZERS[optimizer])
    for name in names:
        built = installed_ops.get(name) and accelerator_name == device.type  # by DS_BUILD_OPS
        if not built and not Path(_get_build_directory(name, False), f"{name}.so").exists():
            yield name
