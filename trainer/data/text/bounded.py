"""Limits for other people's programs, as chat templates are."""

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
    """Raise MemoryError in what takes `memory` more bytes than the process has, TimeoutError after
    CPU seconds.

    Only the main thread has the limit of time: no other is told of signals. Only Linux shows what
    the process has.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(
            resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard)
        )
    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, _late) if timed else None
    if timed:
        signal.setitimer(
            signal.ITIMER_VIRTUAL, seconds, 1.0
        )  # again, where the program catches the first
    try:
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
