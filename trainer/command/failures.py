"""The cause among the ranks that failed: the others only met the end of another one."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.run.notes import LastWords


@dataclass(frozen=True)
class Failure:
    """A rank that failed, as the launcher saw it."""

    rank: int
    code: int
    """Its exit code; below zero: the signal that ended it."""
    at: float
    """The time when it was last seen alive, by the machine's clock."""
    words: LastWords | None = None

    @property
    def follows(self) -> bool:
        """True if it reports that it failed because of another one."""
        return self.words is not None and self.words.follows


def cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the first rank that failed by itself: processes neither end nor are seen to end in the order of causes.

    Those are the ranks that report an error, and those that a signal ended. Next are SIGABRT, with
    which libraries end a process, some when another rank is gone, and exit codes without a report.
    Last are ranks that report a lost connection.
    """
    return min(failures, key=_order, default=None)


def _order(failure: Failure) -> tuple[int, float, int]:
    if failure.words is not None:
        return (2 if failure.follows else 0), failure.words.at, failure.rank
    by_signal = failure.code < 0 and failure.code != -signal.SIGABRT
    return (0 if by_signal else 1), failure.at, failure.rank
