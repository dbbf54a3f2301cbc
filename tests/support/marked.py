"""The processes of one run, found by a variable of their environment."""

from __future__ import annotations

import time

import psutil

from tests.support.commands import TRAIN

MARK = "MESHLOOM_TESTS_RUN"


def processes(mark: str) -> list[psutil.Process]:
    """Return the living processes of the run whose MARK is `mark`."""
    results = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                results.append(process)
        except psutil.Error:
            continue
    return results


def ranks(mark: str) -> list[psutil.Process]:
    """Return them by rank."""
    results = [one for one in processes(mark) if "RANK" in one.environ() and TRAIN in one.cmdline()]
    return sorted(results, key=lambda one: int(one.environ()["RANK"]))


def ended(mark: str, seconds: float) -> bool:
    """Return True if every process of the run ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while processes(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def sweep(mark: str) -> None:
    for one in processes(mark):
        one.kill()
