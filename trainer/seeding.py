"""Randomness derived from what it is for, so that nothing random has to be stored (contract 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager


def derive(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_dropout(seed: int, step: int, micro_batch: int, data_rank: int) -> None:
    """Set torch's generators for one forward and backward pass of one data-parallel rank."""
    import torch

    value = derive("dropout", seed, step, micro_batch, data_rank)
    # torch.manual_seed does the same for devices that are not in use, for 70 microseconds
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


@contextmanager
def seeded_init(seed: int, name: str) -> Iterator[None]:
    """Initial values of the module `name`: the same in every layout (contract 4). Restores the CPU generator."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive("init", seed, name))
        yield
