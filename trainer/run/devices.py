"""What a device can do."""

from __future__ import annotations

import re

PEAK_FLOPS = {
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense 16-bit FLOP/s by words of the device's name, from the vendors' data sheets; the narrower name comes first."""


def peak_flops(device_name: str) -> float | None:
    """The peak of a device such as `NVIDIA H100 80GB HBM3` in FLOP/s (bfloat16, or float16 where it has none)."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((peak for name, peak in PEAK_FLOPS.items() if words >= set(name.split())), None)
