"""Eight-bit integers with a scale for each row: the weights of LLM.int8() (arXiv 2208.07339).

Each value is stored as an integer from -127 to 127, times the largest magnitude of its row over
127: value for value as bitsandbytes' `int8_vectorwise_quant`, without its threshold. The inputs of
a layer are not quantised here, and so no column of outliers is kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trainer.models.finetuning.quantised.format import FLOAT, WHOLE, MatrixPart, floats

LARGEST = 127
"""The code of the largest magnitude of a row."""
SMALLEST = 1e-36
"""A scale whose inverse, times 127, is finite in float32; smaller ones count as this."""


class Int8(NamedTuple):
    """The format; it has no options."""

    @property
    def name(self) -> str:
        return "int8"

    def size(self, shape: Sequence[int], parts: int = 1) -> int:
        rows, columns = shape
        return FLOAT * rows + rows * columns // parts

    def quantise(self, matrix: torch.Tensor) -> torch.Tensor:
        values = matrix.detach().float()
        scales = values.abs().amax(1)
        factors = scales.clamp(min=SMALLEST).reciprocal() * LARGEST
        codes = torch.round(values * factors[:, None]).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.flatten().view(torch.uint8)])

    def divided(self, data: torch.Tensor, shape: Sequence[int], part: MatrixPart) -> torch.Tensor:
        rows, columns = shape
        scales, codes = data.split([FLOAT * rows, rows * columns])
        pieces = codes.view(rows, columns).chunk(part.of, part.dim)
        return torch.cat([row for piece in pieces for row in (scales, piece.flatten())])

    def dequantise(
        self,
        data: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        part: MatrixPart = WHOLE,
    ) -> torch.Tensor:
        rows, columns = shape[-2:]
        scales, codes = data.split([FLOAT * rows, rows * columns // part.of], -1)
        of_rows = floats(scales)[..., None]
        if part.dim == 0:
            of_rows = of_rows.chunk(part.of, -2)[part.number]
            rows //= part.of
        else:
            columns //= part.of
        integers = codes.contiguous().view(torch.int8).unflatten(-1, (rows, columns))
        return (integers.float() * of_rows * (1 / LARGEST)).to(dtype)
