"""Where the documents of a packed micro-batch begin and end: from their lengths, without a wait for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Documents(NamedTuple):
    """What is behind a row's last document, its padding, is one more."""

    numbers: torch.Tensor
    """Of the document that each token is of, within its row, int64 [batch, sequence]."""
    positions: torch.Tensor
    """Of each token in its document, from 0 on, int64 [batch, sequence]."""
    lengths: torch.Tensor
    """Of the document that each token is of, int64 [batch, sequence]."""
    borders: torch.Tensor
    """Where documents begin, over all rows laid end to end, and the end, int32; an empty one begins where it ends."""


def documents_of(lengths: torch.Tensor, sequence: int) -> Documents:
    """Of rows of `sequence` tokens; `lengths` [batch, most] has zeros for the documents that a row has fewer."""
    lengths = torch.cat([lengths, sequence - lengths.sum(1, keepdim=True)], 1)
    ends = lengths.cumsum(1)
    places = torch.arange(sequence, device=lengths.device).expand(len(lengths), -1).contiguous()
    numbers = torch.searchsorted(ends, places, right=True)
    positions = places - (ends - lengths).gather(1, numbers)
    borders = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return Documents(numbers, positions, lengths.gather(1, numbers), borders)
