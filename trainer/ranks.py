"""The processes of a run, as the few host-side things that code outside the engines needs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.errors import MeshloomError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place among the `world_size` processes of the run.

    Works without a process group when `world_size` is 1. All methods are collective:
    every rank has to call them in the same order.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Raises on every rank what `work` raised on rank 0, so that one mistake is never a hang elsewhere.
        """
        return self.on_each(lambda: work() if self.first else None)[0]  # type: ignore[return-value]

    def on_each(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; raises everywhere the error of the lowest failing rank."""
        result: Any = None
        failed = False
        try:
            result = work()
        except Exception as error:  # raised again below, on every rank
            result, failed = error, True
        outcomes = self.gather((failed, result))
        for peer, (peer_failed, outcome) in enumerate(outcomes):
            if peer_failed:
                if isinstance(outcome, MeshloomError):
                    outcome.shared = True
                    raise outcome
                if peer == self.rank:
                    raise outcome
                raise RuntimeError(f"rank {peer} failed: {outcome!r}")
        return [outcome for _, outcome in outcomes]


ALONE = Ranks()
"""One process by itself, with or without a process group."""
