"""Work shared among processes of this machine; results come in the order of the inputs."""

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

from trainer.supervise.process import cores

T = TypeVar("T")
R = TypeVar("R")

_ALONE = 4
"""The number of inputs that this process handles before it starts others."""
_WORK: list[Callable[[Any], Any]] = []
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
        seen = "a process that prepares data was killed; the machine may be out of memory"
        raise RuntimeError(seen) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """Set up a worker before its first input."""
    signal.set_wakeup_fd(-1)  # else a signal to a worker would be taken for one to its parent
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its workers
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # threads of its pool do not exist in a fork
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _WORK[:] = [work]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _do(one: Any) -> Any:
    return _WORK[0](one)
