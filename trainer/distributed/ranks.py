"""The processes of a run, with the operations on the host that code outside the engines needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from trainer.errors import MeshloomError, shared

T = TypeVar("T")
LONGEST_PAUSE = 1.0
"""Seconds between two looks at the store."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the `world_size` processes of the run.

    Works without a process group when `world_size` is 1. All methods are collective: every rank has
    to call them in the same order.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None
    """The process group in which they communicate; None: that of the run."""
    keepers: tuple[int, ...] = ()
    """For each rank, the first rank that sees the same run folder; empty if all share one."""
    among_keepers: Any = None
    """The process group, on the host, of the keepers, if there are several."""

    def on_host(self) -> Ranks:
        """Return the same ranks with an own group on the host, for use in a thread. Collective."""
        if self.world_size == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo"))

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def keeper(self) -> int:
        """The rank that writes shared files into the run folder that this rank sees."""
        return self.keepers[self.rank] if self.keepers else 0

    @property
    def beside(self) -> list[int]:
        """The ranks that see the same run folder as this one."""
        keepers = self.keepers or (0,) * self.world_size
        return [rank for rank, keeper in enumerate(keepers) if keeper == self.keeper]

    def barrier(self) -> None:
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any_soon(self, value: bool) -> Callable[[], bool]:
        """Begin to ask if `value` is true on any rank; the returned function waits for the answer.

        On the host: these ranks have to be `on_host`.
        """
        if self.world_size == 1:
            return lambda: value
        import torch
        import torch.distributed as dist

        found = torch.tensor([value], dtype=torch.uint8)
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(found)

        return answer

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Raises on every rank the error of rank 0, so that one mistake is never a hang elsewhere.
        """
        return self.on_each(lambda: work() if self.first else None)[0]  # type: ignore[return-value]

    def on_keepers(self, work: Callable[[], T]) -> T:
        """Run `work` once for each run folder; return this folder's result. Raises as `on_each`."""
        return self.each_keeper(work)[self.keeper]

    def each_keeper(self, work: Callable[[], T]) -> dict[int, T]:
        """Run `work` once for each run folder; return results by keeper. Raises as `on_each`."""
        found = self.on_each(lambda: work() if self.rank == self.keeper else None)
        return {keeper: found[keeper] for keeper in sorted({*self.keepers} or {0})}  # type: ignore[misc]

    def on_each(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; return all results. Raises the lowest rank's error on all."""
        return self._agree(_outcome(work))

    def on_own(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; return this rank's result, unsent. Raises as `on_each`."""
        failed, result = _outcome(work)
        self._agree((failed, result if failed else None))
        return result  # type: ignore[no-any-return]

    def await_first(self, work: Callable[[], T]) -> T:
        """Run `work` as `on_first` does, even if it takes hours: see `await_each`."""
        return self.await_each(lambda: work() if self.first else None)[0]  # type: ignore[return-value]

    def await_each(self, work: Callable[[], T]) -> list[T]:
        """Run `work` as `on_each` does, even if it takes hours: others wait without a timeout.

        They wait outside collectives; the watchdog ends the run if a rank dies over its work.
        """
        outcome = _outcome(work)
        if self.world_size > 1:
            _await_all_done(self.rank, self.world_size)
        return self._agree(outcome)

    def _agree(self, outcome: tuple[bool, Any]) -> list[Any]:
        mine = outcome[1]
        # other errors than this project's need not survive being pickled
        as_text = outcome[0] and not isinstance(mine, MeshloomError)
        outcomes = self.gather((outcome[0], repr(mine) if as_text else mine))
        for peer, (failed, result) in enumerate(outcomes):
            if failed and isinstance(result, MeshloomError):
                raise shared(result)
            if failed:
                raise mine if peer == self.rank else RuntimeError(f"rank {peer} failed: {result}")
        return [result for _, result in outcomes]


def _outcome(work: Callable[[], Any]) -> tuple[bool, Any]:
    """Run `work`; return True if it failed, and its result or error."""
    try:
        return False, work()
    except Exception as error:  # raised again on all ranks
        return True, error


def _await_all_done(rank: int, world_size: int) -> None:
    """Wait over the store, without a timeout, until all have come here as often as this rank.

    Raises RuntimeError where the store is gone, and with it the rank or launcher that has it.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    try:
        number = store.add(f"meshloom/rendezvous/{rank}", 1)
        key = f"meshloom/rendezvous/done/{number}"
        done, pause = store.add(key, 1), 0.005
        while done < world_size:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            done = store.add(key, 0)
    except RuntimeError as error:
        raise RuntimeError(
            f"the store of the ranks is gone, with the rank or launcher that has it: {error}"
        ) from error


ALONE = Ranks()
"""One process by itself, with or without a process group."""
