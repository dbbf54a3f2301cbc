"""Which of the ranks that failed is the cause, and which only met the end of another one."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.run.notes import LastWords


@dataclass(frozen=True)
class Failure:
    """A rank that ended otherwise than well, as the launcher saw it."""

    rank: int
    code: int
    """Its exit code; below zero: the signal that ended it."""
    at: float
    """When it was last seen alive, by the machine's clock."""
    words: LastWords | None = None

    @property
    def follows(self) -> bool:
        """Whether it says that it failed because of another one."""
        return self.words is not None and self.words.follows


def cause(failures: Sequence[Failure]) -> Failure | None:
    """The first of those that failed by themselves: processes don't end, and aren't seen to, in the order of causes.

    Such are the ranks that say why and those that a signal ended. SIGABRT is what libraries end a process with, some of
    them where another rank is gone; an exit code without a word tells no more. Least is known by those who say that
    they lost a connection.
    """
    return min(failures, key=_order, default=None)


def _order(failure: Failure) -> tuple[int, float, int]:
    if failure.words is not None:
        return (2 if failure.follows else 0), failure.words.at, failure.rank
    by_signal = failure.code < 0 and failure.code != -signal.SIGABRT
    return (0 if by_signal else 1), failure.at, failure.rank
