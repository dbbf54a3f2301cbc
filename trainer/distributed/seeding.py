"""Random seeds derived from their purpose, so that no random state is stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager


def derive(*parts: int | str) -> int:
    """Derive a 63-bit seed from every part and nothing else, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def step_seed(seed: int, step: int, data_rank: int) -> int:
    """Derive the seed of one step's dropout on one data rank."""
    return derive("dropout", seed, step, data_rank)


def seed_generators(value: int) -> None:
    """Seed torch's generators, on the CPU and on the devices in use."""
    import torch

    # torch.manual_seed also seeds devices that are not in use, in 70 microseconds
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


@contextmanager
def seeded_init(seed: int, name: str) -> Iterator[None]:
    """Seed the initial values of module `name`, alike in all layouts, for a while."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive("init", seed, name))
        yield
