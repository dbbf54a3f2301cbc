"""The processes of a run, with the operations on the host that code outside the engines needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from trainer.errors import MeshloomError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

T = TypeVar("T")
LONGEST_PAUSE = 1.0
"""Seconds between two looks at the store."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the `world_size` processes of the run.

    Works without a process group when `world_size` is 1. All methods but `store` are collective:
    every rank has to call them in the same order.
    """

    rank: int = 0
    world_size: int = 1
    group: ProcessGroup | None = None
    """The process group in which they communicate; None: that of the run."""
    node_firsts: tuple[int, ...] = ()
    """For each rank, the first rank that sees the same run folder; empty if all share one."""
    among_node_firsts: Any = None
    """The process group, on the host, of the nodes' first ranks, if there are several."""

    def on_host(self) -> Ranks:
        """Return the same ranks with a new group on the host, as a thread needs one. Collective.

        Its ranks connect where they first send to one another: see `set_up_groups`.
        """
        if self.world_size == 1:
            return self
        import torch.distributed as dist

        group: Any = dist.new_group(backend="gloo")
        return replace(self, group=group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def node_first(self) -> int:
        """The rank that writes shared files into the run folder that this rank sees."""
        return self.node_firsts[self.rank] if self.node_firsts else 0

    @property
    def beside(self) -> list[int]:
        """The ranks that see the same run folder as this one."""
        node_firsts = self.node_firsts or (0,) * self.world_size
        return [
            rank for rank, node_first in enumerate(node_firsts) if node_first == self.node_first
        ]

    def store(self) -> Store:
        """Return PyTorch's store, over which several ranks meet without a group."""
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()

    def barrier(self) -> None:
        self._least(0)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank.

        Each rank receives them all: for what is small, and named where ranks differ.
        """
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values = [value] * self.world_size  # each of them is replaced
        dist.all_gather_object(values, value, group=self.group)
        return values

    def to_node_firsts(self, value: T) -> list[T]:
        """Return all ranks' values on the node's first rank, none elsewhere; on all if several."""
        if self.world_size == 1 or len(set(self.node_firsts)) > 1:
            return self.gather(value)
        import torch.distributed as dist

        values = [value] * self.world_size if self.first else []  # each of them is replaced
        dist.gather_object(value, values or None, group=self.group)
        return values

    def send(self, source: int, value: T) -> T:
        """Return the value of rank `source` on every rank, sent along a tree."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        values = [value]  # replaced on the other ranks
        dist.broadcast_object_list(values, source, group=self.group)
        return values[0]

    def lowest(self, value: T | None) -> tuple[int, T] | None:
        """Return the lowest rank that has a value, with that value; None if no rank has one."""
        source = self._least(self.world_size if value is None else self.rank)
        if source == self.world_size:
            return None
        sent: Any = self.send(source, value)
        return source, sent

    def any(self, value: bool) -> bool:
        """Return True if `value` is true on any rank."""
        return self._least(0 if value else 1) == 0

    def differing(self, value: object) -> list[int]:
        """List the ranks that have another value than rank 0."""
        differs = value != self.send(0, value)
        each = self.gather(differs) if self.any(differs) else []
        return [rank for rank, other in enumerate(each) if other]

    def _least(self, number: int) -> int:
        """Return the smallest number of any rank."""
        if self.world_size == 1:
            return number
        import torch
        import torch.distributed as dist

        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        least = torch.tensor([number], device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def highest_soon(self, value: int) -> Callable[[], int]:
        """Begin to ask for the highest value of all ranks; the returned function waits for it.

        On the host: these ranks have to be `on_host`. Values of 0 to 255.
        """
        if self.world_size == 1:
            return lambda: value
        import torch
        import torch.distributed as dist

        highest = torch.tensor([value], dtype=torch.uint8)
        work = dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group, async_op=True)

        def answer() -> int:
            work.wait()
            return int(highest)

        return answer

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Raises on every rank the error of rank 0, so that one mistake is never a hang elsewhere.
        """
        return self._of_first(_outcome(work) if self.first else (False, None))

    def try_on_first(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 for its errors alone, which are raised on every rank."""

        def tried() -> None:
            work()

        self.on_first(tried)

    def on_node_firsts(self, work: Callable[[], T]) -> T:
        """Run `work` once for each run folder; return this folder's result. Raises as `on_each`."""
        return self.each_node_first(work)[self.node_first]

    def each_node_first(self, work: Callable[[], T]) -> dict[int, T]:
        """Run `work` once for each run folder; return results by its rank. Raises as `on_each`."""
        if len(set(self.node_firsts)) < 2:
            return {0: self.on_first(work)}
        results = self.on_each(lambda: work() if self.rank == self.node_first else None)
        return {node_first: results[node_first] for node_first in sorted(set(self.node_firsts))}  # type: ignore[misc]

    def on_each(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; return all results. Raises the lowest rank's error on all."""
        return self.gather(self.on_own(work))

    def on_own(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; return this rank's result, unsent. Raises as `on_each`."""
        return self._of_own(_outcome(work))

    def await_first(self, work: Callable[[], T]) -> T:
        """Run `work` as `on_first` does, even if it takes hours: see `await_each`."""
        outcome = _outcome(work) if self.first else (False, None)
        self._await_all()
        return self._of_first(outcome)

    def await_each(self, work: Callable[[], T]) -> list[T]:
        """Run `work` as `on_each` does, even if it takes hours: others wait without a timeout.

        They wait outside collectives; the watchdog ends the run if a rank dies over its work.
        """
        outcome = _outcome(work)
        self._await_all()
        return self.gather(self._of_own(outcome))

    def _await_all(self) -> None:
        """Wait over the store, without a timeout, until all have come here as often as this rank.

        Raises RuntimeError where the store is gone, and with it the rank or launcher that has it.
        """
        if self.world_size == 1:
            return
        store = self.store()
        try:
            number = store.add(f"meshloom/rendezvous/{self.rank}", 1)
            key = f"meshloom/rendezvous/done/{number}"
            done = store.add(key, 1)
            pause = 0.005
            while done < self.world_size:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                done = store.add(key, 0)
        except RuntimeError as error:
            gone = "the store of the ranks is gone, with the rank or launcher that has it"
            raise RuntimeError(f"{gone}: {error}") from error

    def _of_first(self, outcome: tuple[bool, object]) -> Any:
        """Return rank 0's result, or raise its error."""
        failed, result = self.send(0, (outcome[0], _sendable(*outcome)))
        return result if not failed else self._raise(0, result, outcome[1])

    def _of_own(self, outcome: tuple[bool, object]) -> Any:
        """Return this rank's result, or raise the error of the lowest rank that has one."""
        failure = self.lowest(_sendable(*outcome) if outcome[0] else None)
        return outcome[1] if failure is None else self._raise(*failure, outcome[1])

    def _raise(self, source: int, failure: object, own: Any) -> NoReturn:
        if isinstance(failure, MeshloomError):
            raise failure.share()
        raise own if source == self.rank else RuntimeError(f"rank {source} failed: {failure}")


def group_of_rows(rows: Sequence[Sequence[int]], backend: str | None = None) -> Any:
    """Make the process groups of rows of ranks; return this rank's, None if it is in no row.
    Collective.

    NCCL splits its communicator once for all rows: one group after another would have every rank
    take part in the making of each.
    """
    import torch.distributed as dist

    if backend is None and dist.distributed_c10d._get_default_group().bound_device_id is not None:
        group = dist.split_group(split_ranks=[list(row) for row in rows])
        return None if group is dist.GroupMember.NON_GROUP_MEMBER else group
    return dist.new_subgroups_by_enumeration([list(row) for row in rows], backend=backend)[0]


def _outcome(work: Callable[[], object]) -> tuple[bool, object]:
    """Run `work`; return True if it failed, and its result or error."""
    try:
        return False, work()
    except Exception as error:  # raised again on all ranks
        return True, error


def _sendable(failed: bool, result: object) -> object:
    """Return what is sent: other errors than this project's need not survive being pickled."""
    return repr(result) if failed and not isinstance(result, MeshloomError) else result


ALONE = Ranks()
"""One process by itself, with or without a process group."""
