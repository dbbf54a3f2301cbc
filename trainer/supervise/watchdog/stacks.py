"""The stacks of this process's threads, for the report of a rank that makes no progress."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from trainer.supervise import stall

FRAMES = 8
SUPERVISE = f"{Path(__file__).parent.parent}{os.sep}"
PROJECT = f"{Path(__file__).parent.parent.parent}{os.sep}"
"""The beginnings of the names of files whose threads only watch, and of all this project's."""
MOST_THREADS = 3


def main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def works() -> bool:
    """Return True if the main thread works on the host, and waits in no collective."""
    frames = traceback.walk_stack(main_frame())
    files = {os.path.basename(frame.f_code.co_filename) for frame, _ in frames}
    return files.isdisjoint(stall.COLLECTIVES)


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    frames = traceback.extract_stack(frame)[-FRAMES:]
    return tuple(f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno} {f.name}" for f in frames)


def working_threads() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return names and stacks of the threads that run this project's code, and do not just wait."""
    frames = sys._current_frames()
    threads = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread is threading.main_thread():
            continue
        files = {one.f_code.co_filename for one, _ in traceback.walk_stack(frame)}
        works = any(file.startswith(PROJECT) and not file.startswith(SUPERVISE) for file in files)
        stack = stack_of(frame)
        if works and not stall.idle(stack[-1]):
            threads.append((thread.name, stack))
    return tuple(sorted(threads, key=lambda one: stall.in_collective(one[1]))[:MOST_THREADS])
