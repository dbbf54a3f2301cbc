"""Tensors, and hashes of what bitsandbytes makes of them.

python -m tests.support.models.bitsandbytes_record        # writes both files again

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
INT8_FILE = Path(__file__).with_name("int8_of_bitsandbytes.json")
"""The `digest_of` the codes and scales of the `matrix_of` each of `SEEDS`, by the same version."""
SEEDS = range(1000)


def tensor_of(seed: int, values: int | None = None) -> torch.Tensor:
    """Make values of one size or another, some in 16 bits, some with blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = values or 301 + 4099 * seed % 30_000
    tensor = torch.randn(count, generator=generator) * 10 ** (seed % 7 - 4)
    if seed % 3 == 0 and count > 300:
        tensor[:130] = 0
    return tensor.bfloat16() if seed % 2 else tensor


def matrix_of(seed: int) -> torch.Tensor:
    """Make a matrix in float16, which is what bitsandbytes quantises by rows."""
    return tensor_of(seed, 40 * 33).view(40, 33).half()


class Recorded(NamedTuple):
    """What is kept of a tensor in four bits."""

    digest: str
    """A hash of its codes and scales."""
    mean: float
    """The mean of its scales, with double quantisation."""


def recorded(codes: torch.Tensor, scales: torch.Tensor, mean: float, odd: int) -> Recorded:
    """Keep codes, without the last byte of an `odd` number of values, and scales in float32."""
    codes = codes.flatten()
    return Recorded(digest_of(codes[: len(codes) - odd], scales), mean)


def digest_of(codes: torch.Tensor, scales: torch.Tensor) -> str:
    """Return a hash of codes of a byte each, and of scales in float32."""
    parts = codes.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16]


def of_bitsandbytes(tensor: torch.Tensor) -> Recorded:
    """Record what bitsandbytes makes of a tensor."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4")
    _, double = functional.quantize_4bit(
        tensor, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return recorded(packed, state.absmax, float(double.offset), len(tensor) % 2)


def int8_of_bitsandbytes(matrix: torch.Tensor) -> str:
    """Return the hash of what bitsandbytes makes of a matrix in 8-bit integers."""
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(matrix)
    return digest_of(codes, scales.float())


if __name__ == "__main__":
    FILE.write_text(json.dumps([of_bitsandbytes(tensor_of(seed)) for seed in SEEDS]) + "\n")
    digests = [int8_of_bitsandbytes(matrix_of(seed)) for seed in SEEDS]
    INT8_FILE.write_text(json.dumps(digests) + "\n")
