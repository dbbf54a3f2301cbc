"""Four-bit NormalFloat: NF4 of QLoRA (arXiv 2305.14314), value for value as bitsandbytes 0.50.

A matrix is divided into blocks of 64 values, row after row. Each value is stored as the nearest of
16 numbers, times the largest magnitude of its block (the block's scale). With double quantisation
the scales, less their mean, are stored in 8 bits each, by blocks of 256 scales. A part of a matrix
may begin inside a block: it has the scales of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from trainer.models.finetuning.quantised.format import FLOAT, WHOLE, MatrixPart, floats

BLOCK = 64
"""The values that share a scale."""
SCALES = 256
"""The scales of a block in double quantisation."""

_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 numbers, in order (appendix E of the paper, as bitsandbytes has them)."""


class PartSizes(NamedTuple):
    """The numbers of bytes of a matrix's parts, in their order."""

    offset: int
    """The mean of the scales; 0 without double quantisation."""
    floats: int
    """The scales in float32: of blocks, or in double quantisation of blocks of scales."""
    scales: int
    """The scales in 8 bits; 0 without double quantisation."""
    codes: int


class NF4(NamedTuple):
    """The format."""

    double: bool = False
    """True to keep the scales in 8 bits, too."""

    @property
    def name(self) -> str:
        return "nf4 with double_quant" if self.double else "nf4"

    def sizes(self, values: int, parts: int = 1) -> PartSizes:
        """Return the bytes of a tensor of so many values, or of one of its equal parts."""
        blocks = -(-values // BLOCK)
        codes = -(-(values // parts) // 2)
        if self.double:
            return PartSizes(FLOAT, FLOAT * -(-blocks // SCALES), blocks, codes)
        return PartSizes(0, FLOAT * blocks, 0, codes)

    def size(self, shape: Sequence[int], parts: int = 1) -> int:
        return sum(self.sizes(math.prod(shape), parts))

    def quantise(self, matrix: torch.Tensor) -> torch.Tensor:
        flat = matrix.detach().flatten().float()
        blocks = _blocks(flat, BLOCK)
        scales = blocks.abs().amax(1)
        packed = _packed(_nearest(blocks, scales, _codes(flat.device)).flatten()[: len(flat)])
        if not self.double:
            return torch.cat([scales.view(torch.uint8), packed])
        # the exact sum: another would depend on the device, and on the number of threads
        mean = scales.new_tensor(math.fsum(scales.tolist()) / len(scales))
        groups = _blocks(scales - mean, SCALES)
        largest = groups.abs().amax(1)
        small = _nearest(groups, largest, _dynamic(flat.device)).flatten()[: len(scales)]
        parts = (mean[None].view(torch.uint8), largest.view(torch.uint8), small, packed)
        return torch.cat(parts)

    def divided(self, data: torch.Tensor, shape: Sequence[int], part: MatrixPart) -> torch.Tensor:
        values = math.prod(shape)
        of_whole = self.sizes(values)
        scales, codes = data.split([sum(of_whole) - of_whole.codes, of_whole.codes])
        pieces = _unpacked(codes)[:values].view(*shape).chunk(part.of, part.dim)
        return torch.cat([row for piece in pieces for row in (scales, _packed(piece.flatten()))])

    def dequantise(
        self,
        data: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        part: MatrixPart = WHOLE,
    ) -> torch.Tensor:
        values = math.prod(shape[data.ndim - 1 :])
        offset, of_groups, scales, codes = data.split(self.sizes(values, part.of), -1)
        of_blocks = floats(of_groups)
        if self.double:
            groups = _dynamic(data.device)[_blocks(scales.int(), SCALES)] * of_blocks[..., None]
            of_blocks = groups.flatten(-2)[..., : scales.shape[-1]] + floats(offset)
        pairs = _unpacked(codes)[..., : values // part.of]
        if part.of > 1:
            places = _places(part, shape, data.device)
            own = _codes(data.device)[pairs.int()].view(places.shape) * of_blocks[places // BLOCK]
            return own.to(dtype)
        blocks = _codes(data.device)[_blocks(pairs.int(), BLOCK)] * of_blocks[..., None]
        return blocks.flatten(-2)[..., :values].reshape(tuple(shape)).to(dtype)


def _places(part: MatrixPart, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where a part's values are in the whole, row after row: int32 [rows, columns]."""
    rows, columns = shape
    of_dims = [torch.arange(size, dtype=torch.int32, device=device) for size in (rows, columns)]
    of_dims[part.dim] = of_dims[part.dim].chunk(part.of)[part.number]
    return of_dims[0][:, None] * columns + of_dims[1]


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes a byte."""
    pairs = pad(codes, (0, len(codes) % 2), value=_CODES.index(0.0)).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    """Return the codes of bytes, one more than there are if their number is odd."""
    return torch.stack([data >> 4, data & 15], -1).flatten(-2)


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


def _dynamic_numbers() -> tuple[float, ...]:
    """Return the 256 numbers of the 8-bit dynamic type (arXiv 1511.04561), in order.

    Those with exponent e, from 0 to 6, are the middles of 2^e equal parts of 0.1 to 1, times
    10^(e - 6), with both signs; then 0 and 1.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, device="cpu")
        middles = (10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        numbers += [*middles, *(-middle for middle in middles)]
    return tuple(sorted(numbers))


_DYNAMIC = _dynamic_numbers()
"""Made here: code that is compiled can't make them."""


@cache
def _dynamic(device: torch.device) -> torch.Tensor:
    return torch.tensor(_DYNAMIC, device=device)
