"""Work shared among processes of this machine; results come in the order of the inputs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

from trainer.supervise.process import cores
from trainer.supervise.signals import StopSignals

T = TypeVar("T")
R = TypeVar("R")

_ALONE = 4
"""The number of inputs that this process handles before it starts others."""
_WORK: list[Callable[[object], object]] = []
"""The function that a worker process runs."""


def in_order(
    work: Callable[[T], R], given: Iterable[T], workers: int | None = None
) -> Generator[R, None, None]:
    """Apply `work` to each input, in order, in so many processes.

    None: one for each core, or this process if there are few inputs. Workers are forks: what `work`
    holds is neither copied nor sent. At most three inputs for each are in progress. An error of
    `work` is raised here and ends the workers, as does the end of this process.
    """
    rest = iter(given)
    if workers is None:
        yield from map(work, islice(rest, _ALONE))
        # elsewhere, forking is not safe with libraries' threads
        workers = cores() if sys.platform == "linux" else 1
        first = list(islice(rest, 1))
        workers = workers if first else 1
        rest = chain(first, rest)
    if workers < 2:
        yield from map(work, rest)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (work, os.getpid()))
    coming: deque[Future[R]] = deque()
    try:
        with _killed():
            for one in rest:
                coming.append(pool.submit(_do, one))
                if len(coming) == 3 * workers:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
    finally:
        _end(pool)


class Beside:
    """A fork of this process that applies `work` to one input at a time, at the lowest priority.

    It ends with this process.
    """

    def __init__(self, work: Callable[[Any], object]) -> None:
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(1, context, _begin, (work, os.getpid(), 19))

    def begin(self, given: object) -> None:
        """Have `work` applied to an input."""
        with _killed():
            self._next = self._pool.submit(_do, given)

    def result(self) -> Any:
        """Return the result, or raise its error."""
        with _killed():
            return self._next.result()

    def close(self) -> None:
        """End the process at once."""
        _end(self._pool)


def _end(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):  # None after a shutdown
        process.kill()
    pool.shutdown(cancel_futures=True)


@contextmanager
def _killed() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        actual = "a process that prepares data was killed; the machine may be out of memory"
        raise RuntimeError(actual) from error


def _begin(work: Callable[[Any], object], parent: int, nice: int = 0) -> None:
    """Set up a worker before its first input."""
    os.nice(nice)
    signal.set_wakeup_fd(-1)  # else a signal to a worker would be taken for one to its parent
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C and some launchers' signals reach all: the parent ends its workers
    StopSignals.deliver_to(signal.SIG_IGN)
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # threads of its pool do not exist in a fork
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _WORK[:] = [work]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _do(one: object) -> Any:
    return _WORK[0](one)
