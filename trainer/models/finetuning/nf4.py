"""Four-bit NormalFloat: NF4 of QLoRA (arXiv 2305.14314), value for value as bitsandbytes 0.50.

A tensor is divided into blocks of 64 values, row after row. Each value is stored as the nearest of
16 numbers, times the largest magnitude of its block (the block's scale). With double quantisation
the scales, less their mean, are stored in 8 bits each, by blocks of 256 scales.

All that a tensor needs is one row of bytes: the scales, then the codes. So it can be sharded
anywhere, and gathered bytes give the same values under every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

BLOCK = 64
"""The values that share a scale."""
SCALES = 256
"""The scales of a block in double quantisation."""
FLOAT = 4
"""The bytes of a float32."""

_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 numbers, in order (appendix E of the paper, as bitsandbytes has them)."""


class PartSizes(NamedTuple):
    """The numbers of bytes of a tensor's parts, in their order."""

    offset: int
    """Those of the mean of the scales; 0 without double quantisation."""
    floats: int
    """Those of scales in float32: of blocks, or in double quantisation of blocks of scales."""
    scales: int
    """Those of scales in 8 bits; 0 without double quantisation."""
    codes: int


def sizes(values: int, double: bool) -> PartSizes:
    """Return the bytes that a tensor of so many values takes."""
    blocks = -(-values // BLOCK)
    codes = -(-values // 2)
    if double:
        return PartSizes(FLOAT, FLOAT * -(-blocks // SCALES), blocks, codes)
    return PartSizes(0, FLOAT * blocks, 0, codes)


def quantise(values: torch.Tensor, double: bool) -> torch.Tensor:
    """Return the bytes of a whole tensor, uint8 [bytes], on its device."""
    flat = values.detach().flatten().float()
    blocks = _blocks(flat, BLOCK)
    scales = blocks.abs().amax(1)
    codes = _nearest(blocks, scales, _codes(flat.device)).flatten()[: len(flat)]
    codes = pad(codes, (0, len(codes) % 2), value=_CODES.index(0.0)).view(-1, 2)
    packed = codes[:, 0] << 4 | codes[:, 1]
    if not double:
        return torch.cat([scales.view(torch.uint8), packed])
    # the exact sum: another would depend on the device, and on the number of threads
    mean = scales.new_tensor(math.fsum(scales.tolist()) / len(scales))
    groups = _blocks(scales - mean, SCALES)
    floats = groups.abs().amax(1)
    small = _nearest(groups, floats, _dynamic(flat.device)).flatten()[: len(scales)]
    parts = (mean[None].view(torch.uint8), floats.view(torch.uint8), small, packed)
    return torch.cat(parts)


def dequantise(
    data: torch.Tensor, shape: Sequence[int], double: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor of the bytes [bytes]: in float32, then rounded to `dtype`.

    Of a stack, [tensors, bytes], the first of `shape` is the number of its tensors.
    """
    values = math.prod(shape[data.ndim - 1 :])
    offset, floats, scales, codes = data.split(sizes(values, double), -1)
    of_blocks = _floats(floats)
    if double:
        groups = _dynamic(data.device)[_blocks(scales.int(), SCALES)] * of_blocks[..., None]
        of_blocks = groups.flatten(-2)[..., : scales.shape[-1]] + _floats(offset)
    pairs = torch.stack([codes >> 4, codes & 15], -1).flatten(-2)[..., :values]
    blocks = _codes(data.device)[_blocks(pairs.int(), BLOCK)] * of_blocks[..., None]
    return blocks.flatten(-2)[..., :values].reshape(tuple(shape)).to(dtype)


def _floats(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as the float32 that they are; a view of them would need an aligned place."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _blocks(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows [..., values] in blocks [..., blocks, size], the last filled up with zeros."""
    count = -(-flat.shape[-1] // size)
    return pad(flat, (0, count * size - flat.shape[-1])).unflatten(-1, (count, size))


def _nearest(blocks: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the index of the number nearest to each value over its block's scale, uint8."""
    scaled = blocks * (1 / scales.clamp(min=1e-38))[:, None]
    middles = (numbers[:-1] + numbers[1:]) / 2
    return torch.bucketize(scaled.clamp(-1, 1), middles, out_int32=True).to(torch.uint8)


@cache
def _codes(device: torch.device) -> torch.Tensor:
    return torch.tensor(_CODES, device=device)


@cache
def _dynamic(device: torch.device) -> torch.Tensor:
    """Return the 256 numbers of the 8-bit dynamic type (arXiv 1511.04561), in order.

    Those with exponent e, from 0 to 6, are the middles of 2^e equal parts of 0.1 to 1, times
    10^(e - 6), with both signs; then 0 and 1.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, device="cpu")
        middles = (10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        numbers += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(numbers), device=device)
