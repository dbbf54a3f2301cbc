"""DeepSpeed's own operators, which are compiled when they are first used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.engines.engine import Machine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout


def check_compiler(layout: Layout, device: torch.device) -> None:
    """Raises ConfigError where something has to be compiled, and there is nothing to compile it with."""
    from torch.utils.cpp_extension import get_cxx_compiler

    for name in _missing(layout, device):
        for tool, package in ((get_cxx_compiler(), "g++"), ("ninja", "ninja-build")):
            if shutil.which(tool) is None:
                seen = f"no {tool} in PATH, by which DeepSpeed compiles its operator {name}"
                mend = f'Install it (apt install {package}), or set trainer.engine to "mesh" or "accelerate"'
                raise ConfigError(Problem("engine deepspeed", seen, "a C++ compiler and ninja", mend))


def announce(layout: Layout, machine: Machine) -> None:
    """Say what is about to be compiled."""
    if names := list(_missing(layout, machine.device)):
        machine.signs.at(f"compiling DeepSpeed's {' and '.join(names)}, once for this machine")


def _missing(layout: Layout, device: torch.device) -> Iterator[str]:
    from deepspeed.ops import __compatible_ops__ as compatible
    from torch.utils.cpp_extension import _get_build_directory

    used = {
        "deepspeed_shm_comm": device.type == "cpu",  # left out by DeepSpeed where it can't be had
        "async_io": "nvme" in (layout.offload_optimizer, layout.offload_param),
    }
    for name in (name for name, is_used in used.items() if is_used and compatible.get(name)):
        if not Path(_get_build_directory(name, False), f"{name}.so").exists():
            yield name
