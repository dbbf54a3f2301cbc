"""The work of the host for a step does not grow with the number of ranks.

Python's calls are counted: they are the same on each machine, seconds are not. They are those of
the run's loop, with its data, on a fake process group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from tests.support.commands import write_job
from tests.support.fake_ranks import ranks_of
from trainer.config import load
from trainer.engines import Machine
from trainer.run import run
from trainer.run.loop import Hooks, train
from trainer.run.session import Session
from trainer.run.start.request import Request
from trainer.supervise.signals import NoSignals

WARM, COUNTED = 2, 3
"""The steps before the calls are counted, and those in which they are."""


class _Counted(Exception):
    """All steps that are counted are over."""


@contextmanager
def counting(calls: Counter[str]) -> Iterator[Callable[[], None]]:
    """Yield what begins to count Python's calls, by file and function."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    try:
        yield lambda: sys.setprofile(note)
    finally:
        sys.setprofile(None)


def calls_of(folder: Path, world_size: int, *options: str) -> Counter[str]:
    """Return the Python calls of `COUNTED` steps of a rank, after `WARM`."""
    calls: Counter[str] = Counter()

    def loop(engine: Any, loader: Any, schedule: Any, plan: Any, _: object, state: Any) -> None:
        with counting(calls) as begin:

            class Quiet(Hooks):
                def stop(self, step: int) -> Callable[[], bool]:
                    if step == WARM:
                        begin()
                    if step == WARM + COUNTED:
                        raise _Counted
                    return super().stop(step)

            train(engine, loader, schedule, plan, Quiet(), state)

    folder.mkdir()
    config = load(
        write_job(folder), [f"train_batch_size={2 * world_size}", "trainer.steps=20", *options]
    )
    with ranks_of(world_size) as ranks, patch.object(run, "loop", loop):
        machine = Machine(torch.device("cpu"), ranks, 8)
        with pytest.raises(_Counted):
            session = Session(Request(), machine, Console(file=StringIO()), NoSignals())
            run.execute(session, config)
    return calls


LAYOUTS = {
    "zero2": ["zero_optimization.stage=2", "trainer.mesh.shard={ranks}"],
    "hsdp": ["zero_optimization.stage=3", "trainer.mesh.replicate={nodes}", "trainer.mesh.shard=8"],
    "Muon": [
        "zero_optimization.stage=2",
        "optimizer.type=Muon",
        "trainer.mesh.replicate={nodes}",
        "trainer.mesh.shard=8",
    ],
}


@pytest.mark.first("hsdp")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_a_thousand_ranks_calls_as_much_as_one_of_eight(
    tmp_path: Path, name: str
) -> None:
    few, many = (
        calls_of(
            tmp_path / str(ranks),
            ranks,
            "trainer.engine=mesh",
            *(word.format(ranks=ranks, nodes=ranks // 8) for word in LAYOUTS[name]),
        )
        for ranks in (8, 1024)
    )
    more = {place: (few[place], n) for place, n in many.items() if n > few[place] + COUNTED}
    print(f"{few.total() // COUNTED:,} and {many.total() // COUNTED:,} calls a step")
    assert many.total() <= 1.02 * few.total(), more
