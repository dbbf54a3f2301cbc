"""A quantised base, quantised and read again in plain NumPy, from the formats' description.

Written from docs/qlora.md and from bitsandbytes' definition of its data types.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.sections.adapter import QuantizeSection

Floats = np.ndarray[Any, np.dtype[np.float32]]

_NF4 = """
-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
-0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""
NF4 = np.array(_NF4.split(), np.float32)
"""The numbers of NF4, in order."""


def dynamic() -> Floats:
    """Return the numbers of the 8-bit dynamic type, in order."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, device="cpu").numpy()
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            middle = np.float32(10 ** (exponent - 6)) * ((low + high) / np.float32(2))
            numbers += [float(middle), -float(middle)]
    return np.array(sorted(numbers), np.float32)


def rounded(value: torch.Tensor, quantize: QuantizeSection) -> torch.Tensor:
    """Return a matrix as it is after it was quantised and dequantised, in float32."""
    if quantize.type == "int8":
        return _rounded_to_integers(value)
    flat: Floats = value.detach().float().flatten().numpy()
    scales = _scales(flat, 64)
    used = scales
    if quantize.double_quant:
        mean = np.float32(sum(map(Fraction, scales.tolist())) / len(scales))
        used = _nearest(scales - mean, _scales(scales - mean, 256), 256, dynamic()) + mean
    indices = _indices(flat, scales, 64, NF4)
    values = NF4[indices] * np.repeat(used, 64)[: len(flat)]
    return torch.from_numpy(values).view(value.shape)


def _rounded_to_integers(value: torch.Tensor) -> torch.Tensor:
    """Return a matrix in 8-bit integers, a scale for each row, in float32."""
    matrix: Floats = value.detach().float().numpy()
    scales = np.abs(matrix).max(1, keepdims=True)
    factors = np.float32(1) / np.maximum(scales, np.float32(1e-36)) * np.float32(127)
    return torch.from_numpy(np.round(matrix * factors) * scales * np.float32(1 / 127))


def read(
    data: torch.Tensor,
    shape: Sequence[int],
    quantize: QuantizeSection,
    dim: int = 0,
    parts: int = 1,
) -> torch.Tensor:
    """Return the weight, in float32, that a run has in these bytes: [mean] scales codes.

    Of equal parts along `dim` each has the mean and scales of the whole, and its own codes. A stack
    has such bytes for each of its matrices.
    """
    if data.ndim == 2:
        return torch.stack([read(matrix, shape[1:], quantize) for matrix in data])
    count = int(np.prod(shape))
    places = np.split(np.arange(count).reshape(tuple(shape)), parts, dim)
    whole = np.empty(count, np.float32)
    for own, raw in zip(places, np.split(data.numpy(), parts), strict=True):
        whole[own.ravel()] = _part_of(raw.tobytes(), shape, quantize, own.ravel())
    return torch.from_numpy(whole).view(*shape)


def _part_of(raw: bytes, shape: Sequence[int], quantize: QuantizeSection, places: Any) -> Floats:
    """Return the values, at these places of the whole, that a part's bytes are."""
    rows, columns = shape
    if quantize.type == "int8":
        scales = np.frombuffer(raw[: 4 * rows], np.float32)
        integers = np.frombuffer(raw[4 * rows :], np.int8)
        return integers * scales[places // columns] * np.float32(1 / 127)
    blocks = -(-rows * columns // 64)
    scales, codes = _scales_and_codes(raw, blocks, quantize.double_quant)
    indices = np.stack([codes // 16, codes % 16], 1).ravel()[: places.size]
    return NF4[indices] * scales[places // 64]


def _scales_and_codes(raw: bytes, blocks: int, double: bool) -> tuple[Floats, Any]:
    """Return the scales, and the bytes of the codes."""
    at = 4 if double else 0
    mean = np.frombuffer(raw[:at], np.float32)
    floats = -(-blocks // 256) if double else blocks
    scales = np.frombuffer(raw[at : at + 4 * floats], np.float32)
    at += 4 * floats
    if double:
        codes = np.frombuffer(raw[at : at + blocks], np.uint8)
        scales = dynamic()[codes] * np.repeat(scales, 256)[:blocks] + mean
        at += blocks
    return scales, np.frombuffer(raw[at:], np.uint8)


def quantised(model: nn.Module, blocks: Sequence[str], quantize: QuantizeSection) -> None:
    """Round the frozen linear layers of a model's blocks, in place, as a format does; of each stack
    of experts, every matrix by itself."""
    inside = tuple(f"{block}." for block in blocks)
    for name, module in model.named_modules():
        if name.startswith(inside) and hasattr(type(module), "_apply_gate"):
            for stack in module.parameters(recurse=False):
                if stack.ndim == 3 and not stack.requires_grad:
                    stack.data = torch.stack([rounded(matrix, quantize) for matrix in stack])
        copies = "original_module" in name or "lora_" in name
        if not name.startswith(inside) or copies or type(module) is not nn.Linear:
            continue
        if not module.weight.requires_grad:
            module.weight.data = rounded(module.weight, quantize)


def _scales(flat: Floats, size: int) -> Floats:
    """Return the largest magnitude of each block."""
    return np.maximum.reduceat(np.abs(flat), np.arange(0, len(flat), size))


def _indices(flat: Floats, scales: Floats, size: int, numbers: Floats) -> Any:
    """Return the index of the number nearest to each value over its block's scale."""
    factors = np.float32(1) / np.maximum(scales, np.float32(1e-38))
    scaled = np.clip(flat * np.repeat(factors, size)[: len(flat)], -1, 1)
    return np.searchsorted((numbers[:-1] + numbers[1:]) / np.float32(2), scaled)


def _nearest(flat: Floats, scales: Floats, size: int, numbers: Floats) -> Floats:
    """Return each value as the nearest number, times its block's scale."""
    values = numbers[_indices(flat, scales, size, numbers)] * np.repeat(scales, size)[: len(flat)]
    return values.astype(np.float32)
