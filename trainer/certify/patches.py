"""Constants of our own that a certificate changes while it runs; no library is patched here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def constant(module: ModuleType, name: str, value: int) -> Iterator[None]:
    """Give a size of `module` a value at which a tiny run shows what a large one does."""
    default = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, default)
