"""Randomness derived from what it is for, so that nothing random has to be stored (contract 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager


def derive(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def step_seed(seed: int, step: int, data_rank: int) -> int:
    """What the dropout of one step on one data rank is derived from."""
    return derive("dropout", seed, step, data_rank)


def seed_generators(value: int) -> None:
    """Set torch's generators, those of the devices that are in use."""
    import torch

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
