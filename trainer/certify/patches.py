"""Constants of our own that a certificate changes while it runs; no library is patched here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from unittest import mock


def constant(module: ModuleType, name: str, value: int) -> AbstractContextManager[int]:
    """Give a size of `module` a value at which a tiny run shows what a large one does."""
    return mock.patch.object(module, name, value)
