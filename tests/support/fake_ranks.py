"""The first of many ranks, whose others are not there: it counts what they would send."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.distributed.ranks import Ranks


@dataclass(frozen=True)
class Counting(Ranks):
    """The first of ranks that have its own values; it counts the bytes that another receives."""

    received: Counter[str] = field(default_factory=Counter)

    def on_host(self) -> Ranks:
        self.received["host groups"] += 1
        return self

    def gather(self, value: Any) -> list[Any]:
        """Every rank's length, and every rank's value, as long as the longest."""
        self.received["gathered"] += (self.world_size - 1) * (8 + len(pickle.dumps(value)))
        return [value] * self.world_size

    def send(self, source: int, value: Any) -> Any:
        self.received["broadcast"] += 8 + len(pickle.dumps(value))
        return value

    def _least(self, number: int) -> int:
        self.received["reduced"] += 2 * 8  # a ring passes it on to all, twice
        return number

    def _await_all(self) -> None: ...

    @property
    def objects(self) -> int:
        return sum(self.received[kind] for kind in ("gathered", "broadcast", "reduced"))


@contextmanager
def ranks_of(world_size: int) -> Iterator[Counting]:
    """Be the first of so many ranks, on a fake process group."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield Counting(0, world_size)
    finally:
        dist.destroy_process_group()
