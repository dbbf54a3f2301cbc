"""A constant of our own that a certificate changes while it runs; no library is patched here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.tasks import cross_entropy


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Split the loss into chunks of `size` bytes, so that a few tokens fill several of them.

    By default (`trainer.tasks.cross_entropy`) all tokens of a tiny run are in one, and an error
    between chunks would not show. It can go when a task takes the size as an argument.
    """
    default = cross_entropy.CHUNK_BYTES
    cross_entropy.CHUNK_BYTES = size
    try:
        yield
    finally:
        cross_entropy.CHUNK_BYTES = default
