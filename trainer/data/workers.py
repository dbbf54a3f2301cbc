"""Work shared among processes of this machine, its results in the order of what was given."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_ALONE = 4
"""Pieces of work that this process does by itself before others are started, unless it is told how many."""
_WORK: list[Callable[[Any], Any]] = []
"""Of a worker: what it does."""


def in_order(work: Callable[[T], R], given: Iterable[T], workers: int | None = None) -> Generator[R, None, None]:
    """`work` of each, in order, by so many processes; None: by the cores, and what is little by this one alone.

    They are forks of this process: what `work` holds is neither copied nor sent. At most three tasks for each
    are on their way. What `work` raises is raised here, and ends the others, as the end of this process does.
    """
    rest = iter(given)
    if workers is None:
        yield from map(work, islice(rest, _ALONE))
        workers = cores() if sys.platform == "linux" else 1  # elsewhere a fork of libraries' threads is not safe
        first = list(islice(rest, 1))
        workers, rest = workers if first else 1, chain(first, rest)
    if workers < 2:
        yield from map(work, rest)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (work, os.getpid()))
    coming: deque[Future[R]] = deque()
    try:
        for one in rest:
            coming.append(pool.submit(_do, one))
            if len(coming) == 3 * workers:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError("a process that prepares data was killed; the machine may be out of memory") from error
    finally:
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """In a worker, before its first work."""
    signal.set_wakeup_fd(-1)  # else a signal to a worker would be taken for one to its parent
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its workers
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # threads of its pool are not there in a fork
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _WORK[:] = [work]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _do(one: Any) -> Any:
    return _WORK[0](one)
