"""The vote of all ranks before each step: does the run stop, and has each rank its data?"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

from trainer.data.stream import Stream
from trainer.distributed.ranks import Ranks
from trainer.run.loop import LoopPlan
from trainer.state import RunState

_SHORTEST = 0.01
_LONGEST = 1.0
"""The seconds between two votes while a rank waits for data: each pause is twice the last one."""


class Ballot(IntEnum):
    """A rank's vote; the highest of all ranks counts."""

    TRAIN = 0
    WAIT = 1
    STOP = 2


class Vote:
    """Begins before a step and is counted after it, so that no step waits for it.

    `stops` returns True if this rank wants the run to stop. `stream`: the data, if it is one whose
    files are prepared meanwhile; the first step is the one after `state`.
    """

    def __init__(
        self,
        ranks: Ranks,
        stops: Callable[[], bool],
        stream: Stream | None,
        plan: LoopPlan,
        state: RunState,
    ) -> None:
        self._ranks = ranks
        self._stops = stops
        self._stream = stream
        self._plan = plan
        self._state = state
        self._result = Ballot.WAIT
        self.paused_seconds = 0.0
        """Seconds for which this rank has waited for the data of any rank."""

    def begin(self, step: int) -> Callable[[], bool]:
        """Begin to vote on a step, from 0; the returned function waits for the result, and returns
        True if the run stops. Collective.
        """
        choice = Ballot.TRAIN if self._has_data(step) else Ballot.WAIT
        if self._stops():
            choice = Ballot.STOP
        count = self._ranks.highest_soon(choice)

        def stops() -> bool:
            self._result = Ballot(count())
            return self._result is Ballot.STOP

        return stops

    def wait(self, step: int) -> bool:
        """Vote until all ranks have data for a step; return True if the run stops. Collective."""
        pause = _SHORTEST
        while self._result is Ballot.WAIT and not self.begin(step)():
            if self._result is Ballot.WAIT:
                if self._stream is not None:
                    self._stream.waits()
                time.sleep(pause)
                self.paused_seconds += pause
                pause = min(2 * pause, _LONGEST)
        return self._result is Ballot.STOP

    def _has_data(self, step: int) -> bool:
        """Return False while a file of the stream is prepared from which a step has samples."""
        if self._stream is None or step >= self._plan.steps:
            return True
        steps = step + 1 - self._state.step
        return self._stream.has(self._state.samples + steps * self._plan.train_batch)
