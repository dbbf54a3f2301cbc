"""Ranks that are threads of one process, without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.distributed.ranks import Ranks
from trainer.errors import MeshloomError


@dataclass(frozen=True)
class Together(Ranks):
    """A rank that is a thread; what it sends and asks goes by `gather`."""

    meeting: Any = None
    values: Any = None

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.meeting.wait(20)
        results = list(self.values)
        self.meeting.wait(20)
        return results

    def send(self, source: int, value: Any) -> Any:
        return self.gather(value)[source]

    def highest_soon(self, value: int) -> Callable[[], int]:
        return partial(max, self.gather(value))

    def _least(self, number: int) -> int:
        return int(min(self.gather(number)))


def together(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Run `work` on each of `count` ranks; return the results, or the errors, by rank."""
    shared = {"meeting": threading.Barrier(count), "values": [None] * count}

    def one(rank: int) -> Any:
        try:
            return work(Together(rank, count, **shared))
        except MeshloomError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
