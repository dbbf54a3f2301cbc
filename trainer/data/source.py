"""Samples by number, whatever they are made of."""

from __future__ import annotations

from typing import Any, Protocol


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def sample_of(source: Source, index: int, epoch: int | None) -> Any:
    """Return a sample as in an epoch, by a source's `in_epoch`; with None, as in evaluation."""
    in_epoch = None if epoch is None else getattr(source, "in_epoch", None)
    return source[index] if in_epoch is None else in_epoch(index, epoch)
