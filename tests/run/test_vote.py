"""The ranks' vote: one that stops, stops all; one without its data is waited for."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.support.together import together
from trainer.data.stream import Place, Stream
from trainer.distributed.ranks import Ranks
from trainer.run.loop import LoopPlan
from trainer.run.vote import Vote
from trainer.state import RunState

PLAN = LoopPlan(steps=10, train_batch=4, log_every=1, save_every=None, evaluate_every=None)


class Files:
    """A stream whose samples up to `position` are there."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.waited = 0

    def has(self, position: int) -> bool:
        return self.position > position

    def waits(self) -> None:
        self.waited += 1


def vote_of(ranks: Ranks, stops: Any = lambda: False, files: Any = None, step: int = 0) -> Vote:
    return Vote(ranks, stops, files, PLAN, RunState(step, 4 * step, 0))


@pytest.mark.parametrize("stopping", [None, 0, 2])
def test_all_ranks_stop_at_the_same_step_if_one_has_to(stopping: int | None) -> None:
    def votes(ranks: Ranks) -> list[bool]:
        vote = vote_of(ranks, lambda: ranks.rank == stopping)
        return [vote.begin(1)(), vote.wait(1)]

    assert together(3, votes) == [[stopping is not None] * 2] * 3


def test_all_ranks_wait_for_the_one_whose_file_is_not_prepared() -> None:
    late = Files(0)
    threading.Timer(0.3, lambda: setattr(late, "position", 100)).start()

    def votes(ranks: Ranks) -> tuple[bool, bool, float]:
        vote = vote_of(ranks, files=late if ranks.rank == 1 else Files(100))
        return vote.begin(1)(), vote.wait(1), vote.paused_seconds

    begun = time.monotonic()
    results = together(2, votes)
    assert time.monotonic() - begun >= 0.3
    assert [result[:2] for result in results] == [(False, False)] * 2
    assert all(paused > 0 for _, _, paused in results)
    assert late.waited > 0


@pytest.mark.parametrize(("step", "position", "has"), [(3, 8, False), (3, 9, True), (10, 0, True)])
def test_a_step_needs_its_own_samples_and_the_end_of_the_run_none(
    step: int, position: int, has: bool
) -> None:
    """Two steps of 4 samples after step 2, whose samples are those before number 8."""
    vote = vote_of(Ranks(), files=Files(8 + position), step=2)
    assert vote._has_data(step) == has


def test_a_stream_whose_reader_has_ended_is_not_waited_for() -> None:
    """The reader hands on an error, which is raised where its steps are read."""
    stream: Any = object.__new__(Stream)
    stream._is_read = False
    stream._places = [Place(0, 0)]
    assert not stream.has(4)
    stream.end_reading()
    assert stream.has(4)
