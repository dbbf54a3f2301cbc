"""DeepSpeed's own operators, which are compiled at their first use."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.engines.engine import Machine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout

OF_OPTIMIZERS = {
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "cpu_adam",
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad": "cpu_adagrad",
    "deepspeed.ops.lion.DeepSpeedCPULion": "cpu_lion",
    "deepspeed.ops.adam.FusedAdam": "fused_adam",
    "deepspeed.ops.lion.FusedLion": "fused_lion",
}
"""Operators by optimizer class; the CPU ones are C++ on any device, the fused ones run on the device."""


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
                seen = f"no {tool} in PATH, by which DeepSpeed compiles its operator {name}"
                mend = f'Install it (apt install {package}), or set trainer.engine to "mesh" or "accelerate"'
                expected = "a C++ compiler and ninja" + (" and CUDA's nvcc" if len(tools) > 2 else "")
                raise ConfigError(Problem("engine deepspeed", seen, expected, mend))


def announce(layout: Layout, machine: Machine, optimizer: str = "") -> None:
    """Tell the user which operators are about to be compiled."""
    if names := list(_missing(layout, machine.device, optimizer)):
        operators = f"operator{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        machine.signs.at(f"compiling DeepSpeed's {operators}, once for this environment: about a minute", stays=True)


def _missing(layout: Layout, device: torch.device, optimizer: str) -> Iterator[str]:
    from deepspeed.ops import __compatible_ops__ as compatible
    from torch.utils.cpp_extension import _get_build_directory

    used = {
        "deepspeed_shm_comm": device.type == "cpu",  # DeepSpeed does without it if it must
        "async_io": "nvme" in (layout.offload_optimizer, layout.offload_param),
    }
    names = [name for name, is_used in used.items() if is_used and compatible.get(name)]
    if optimizer in OF_OPTIMIZERS:
        names.append(OF_OPTIMIZERS[optimizer])
    for name in names:
        if not Path(_get_build_directory(name, False), f"{name}.so").exists():
            yield name
