"""The interface of a format for quantised matrices: values to bytes, and bytes to values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

FLOAT = 4
"""The bytes of a float32."""


class MatrixPart(NamedTuple):
    """A part of a matrix along a dimension: that with a `number`, `of` so many equal ones."""

    dim: int = 0
    number: int = 0
    of: int = 1


WHOLE = MatrixPart()


class WeightFormat(Protocol):
    """A format that keeps a matrix as one row of bytes: its scales, then its codes.

    Scales are those of the whole matrix. So a matrix that is split over tensor ranks is a row of
    bytes for each: the scales of the whole, then the codes of its part.
    """

    @property
    def name(self) -> str:
        """The name for users."""
        ...

    def size(self, shape: Sequence[int], parts: int = 1) -> int:
        """Return the bytes of a matrix [rows, columns], or of one of its equal parts."""
        ...

    def quantise(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a whole matrix, uint8 [bytes], on its device."""
        ...

    def divided(self, data: torch.Tensor, shape: Sequence[int], part: MatrixPart) -> torch.Tensor:
        """Return the bytes of all parts like `part`, one after the other; `data`: of the whole."""
        ...

    def dequantise(
        self,
        data: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        part: MatrixPart = WHOLE,
    ) -> torch.Tensor:
        """Return the matrix of these bytes [bytes]: in float32, then rounded to `dtype`.

        `shape` is that of the whole matrix; the result and the bytes are those of a `part` of it.
        Of a stack, [matrices, bytes], the first of `shape` is the number of its matrices.
        """
        ...


def floats(data: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., 4 n] as float32 [..., n]; a view of them would need an aligned place."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.float32)
