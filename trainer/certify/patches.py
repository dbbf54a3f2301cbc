"""Constants of our own that a certificate changes while it runs; no library is patched here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from unittest import mock

from trainer.tasks.losses import chunks


def constant(module: ModuleType, name: str, value: int) -> AbstractContextManager[int]:
    """Give a size of `module` a value at which a tiny run shows what a large one does."""
    return mock.patch.object(module, name, value)


def loss_in_chunks(size: int) -> AbstractContextManager[int]:
    """Have the loss computed in chunks of `size` bytes of logits, so that few tokens fill many."""
    return constant(chunks, "CHUNK_BYTES", size)
