"""Tensors, and hashes of what bitsandbytes makes of them: `python -m tests.support.models.nf4_record`.

bitsandbytes is no requirement of the tests: where it is installed, PEFT imports it in each process.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).with_name("nf4_of_bitsandbytes.json")
"""A `Recorded` for each of `SEEDS`, by bitsandbytes 0.50.2 on a CPU."""
SEEDS = range(1000)


def tensor_of(seed: int, values: int | None = None) -> torch.Tensor:
    """Make values of one size or another, some in 16 bits, some with blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = values or 301 + 4099 * seed % 30_000
    tensor = torch.randn(count, generator=generator) * 10 ** (seed % 7 - 4)
    if seed % 3 == 0 and count > 300:
        tensor[:130] = 0
    return tensor.bfloat16() if seed % 2 else tensor


class Recorded(NamedTuple):
    """What is kept of a tensor in four bits."""

    digest: str
    """A hash of its codes and scales."""
    mean: float
    """The mean of its scales, with double quantisation."""


def recorded(codes: torch.Tensor, scales: torch.Tensor, mean: float, odd: int) -> Recorded:
    """Keep codes, without the last byte of an `odd` number of values, and scales in float32."""
    codes = codes.flatten()
    parts = codes[: len(codes) - odd], scales.flatten().view(torch.uint8)
    return Recorded(hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16], mean)


def of_bitsandbytes(tensor: torch.Tensor) -> Recorded:
    """Record what bitsandbytes makes of a tensor."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4")
    _, double = functional.quantize_4bit(
        tensor, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return recorded(packed, state.absmax, float(double.offset), len(tensor) % 2)


if __name__ == "__main__":
    FILE.write_text(json.dumps([of_bitsandbytes(tensor_of(seed)) for seed in SEEDS]) + "\n")
