"""The borders of documents in a packed micro-batch, computed without waiting for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PackedDocuments(NamedTuple):
    """The place of each token in the documents of its row; padding counts as one more document."""

    numbers: torch.Tensor
    """The number of each token's document within its row, int64 [batch, sequence]."""
    positions: torch.Tensor
    """The position of each token in its document, from 0 on, int64 [batch, sequence]."""
    lengths: torch.Tensor
    """The length of each token's document, int64 [batch, sequence]."""
    borders: torch.Tensor
    """The starts of documents over all rows laid end to end, and the end, int32."""


def documents_of(lengths: torch.Tensor, sequence: int) -> PackedDocuments:
    """Locate the documents in rows of `sequence` tokens; `lengths` [batch, most] may have zeros."""
    lengths = torch.cat([lengths, sequence - lengths.sum(1, keepdim=True)], 1)
    ends = lengths.cumsum(1)
    places = torch.arange(sequence, device=lengths.device).expand(len(lengths), -1).contiguous()
    numbers = torch.searchsorted(ends, places, right=True)
    positions = places - (ends - lengths).gather(1, numbers)
    borders = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return PackedDocuments(numbers, positions, lengths.gather(1, numbers), borders)
