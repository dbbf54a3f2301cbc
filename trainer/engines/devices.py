"""Accelerators by name, in numbers from their vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator. Bytes, FLOP/s and bytes/s."""

    name: str
    memory: float
    """Device memory as CUDA reports it, which is less than the advertised size."""
    peak: float
    """Dense 16-bit FLOP/s."""
    bandwidth: float
    """Bandwidth of the device's memory."""
    link: float
    """Bandwidth to the other devices of its node, one way."""
    network: float = 50e9
    """Bandwidth to other nodes, one way, for each device: 400 Gb/s unless another is given."""
    latency: float = 20e-6
    """Seconds that a message takes besides its bytes, about NCCL's; data sheets don't give it."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None if it is not known."""

    def lacks(self, least: tuple[int, int]) -> bool:
        """Return True if it is known to be of an earlier generation."""
        return self.capability is not None and self.capability < least


BF16 = (8, 0)
FLOAT8 = (8, 9)
"""The first compute capabilities that multiply in bfloat16 and in float8."""
_CAPABILITY = {
    **{"v100": (7, 0), "t4": (7, 5), "a100": (8, 0), "b200": (10, 0)},
    **dict.fromkeys(("a10", "a10g", "3090"), (8, 6)),
    **dict.fromkeys(("l40s", "l4", "4090"), (8, 9)),
    **dict.fromkeys(("h100", "h200", "gh200"), (9, 0)),
}
"""By the first word of a device's name; NVIDIA's list of CUDA GPUs."""
DEVICES = {
    device.name: replace(device, capability=_CAPABILITY[device.name.partition("-")[0]])
    for device in (
        Device("h100-80gb", 79.1 * GIB, 989e12, 3.35e12, 450e9),
        Device("h100-pcie-80gb", 79.1 * GIB, 756e12, 2.0e12, 64e9),
        Device("h100-nvl-94gb", 93.1 * GIB, 835e12, 3.9e12, 300e9),
        Device("h200-141gb", 139.8 * GIB, 989e12, 4.8e12, 450e9),
        Device("gh200-96gb", 94.5 * GIB, 989e12, 4.0e12, 450e9),
        Device("b200-180gb", 178.4 * GIB, 2250e12, 8.0e12, 900e9),
        Device("a100-80gb", 79.2 * GIB, 312e12, 2.04e12, 300e9, 25e9),
        Device("a100-40gb", 39.4 * GIB, 312e12, 1.56e12, 300e9, 25e9),
        Device("l40s-48gb", 44.4 * GIB, 362e12, 0.864e12, 32e9, 25e9),
        Device("l4-24gb", 22.0 * GIB, 121e12, 0.3e12, 32e9, 12.5e9),
        Device("a10-24gb", 22.0 * GIB, 125e12, 0.6e12, 32e9, 12.5e9),
        Device("a10g-24gb", 22.0 * GIB, 70e12, 0.6e12, 32e9, 12.5e9),
        Device("v100-32gb", 31.7 * GIB, 125e12, 0.9e12, 150e9, 12.5e9),
        Device("t4-16gb", 14.6 * GIB, 65e12, 0.32e12, 16e9, 6.25e9),
        Device("4090-24gb", 23.6 * GIB, 165e12, 1.008e12, 32e9, 1.25e9),
        Device("3090-24gb", 23.6 * GIB, 71e12, 0.936e12, 32e9, 1.25e9),
    )
}
"""Memory as `torch.cuda.get_device_properties` gives it, to about 1 %; the rest is vendors'."""


def device_named(name: str, memory: float = 0) -> Device | None:
    """Return the device of the table with this CUDA name and the nearest memory, in bytes."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    known = [key for key in DEVICES if words.issuperset(key.split("-")[:-1])]
    narrowest = max((len(key.split("-")) for key in known), default=0)
    alike = [DEVICES[key] for key in known if len(key.split("-")) == narrowest]
    return min(alike, key=lambda device: abs(device.memory - memory), default=None)


def peak_of(device: torch.device) -> float | None:
    """Return the FLOP/s of this process's device; None if it is no GPU of the table."""
    known = device_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.peak if known else None
