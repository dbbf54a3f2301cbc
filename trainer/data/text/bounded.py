"""Limits of memory and time for the code of others, such as chat templates."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def bounded(memory: int, seconds: float) -> Iterator[None]:
    """Raise MemoryError in code that takes `memory` more bytes, TimeoutError after CPU seconds.

    Only the main thread, which receives signals, has the limit of time. Only on Linux, which shows
    what the process has, is memory limited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        limit = most if soft == resource.RLIM_INFINITY else min(soft, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, _late) if timed else None
    if timed:  # again each second, where the program catches the first
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
