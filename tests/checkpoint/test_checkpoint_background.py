"""Saving beside the training: what is saved is the state at the call, one save at a time, and
failures are told.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import trainer
from tests.support.checkpoint_pieces import (
    ALONE,
    DESCRIPTION,
    MODEL_FOLDER,
    STATE,
    Live,
    live,
    same,
)
from tests.support.command.own_module import OWN, config
from tests.support.pool import Pools
from trainer.checkpoint import Background, load, newest, save
from trainer.distributed.ranks import Ranks
from trainer.errors import DiskError, NumericsError
from trainer.state import StateTensor


def write_to(folder: Path, step: int):
    def write(entries: Sequence[StateTensor], ranks: Ranks) -> None:
        save(folder, replace(STATE, step=step), entries, DESCRIPTION, MODEL_FOLDER, ranks)

    return write


def overwrite(state: Live) -> None:
    """What the next step does."""
    for tensor in state.tensors.values():
        tensor.fill_(3)


def holds(path: Path, wanted: Live, step: int, ranks: Ranks = ALONE) -> bool:
    back = live(ranks).blank()
    return load(path, back.state_tensors(), ranks).step == step and same(back, wanted)


@pytest.fixture
def gate():
    """Each save waits before its first tensor until the gate is set; counts how many wait."""
    opened = threading.Event()
    opened.waiting = 0  # type: ignore[attr-defined]

    def at(phase: str) -> None:
        if phase == "before":
            opened.waiting += 1  # type: ignore[attr-defined]
            assert opened.wait(20)

    with patch("trainer.checkpoint.faults.at", at):
        yield opened
        opened.set()


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, gate: threading.Event) -> None:
    state = live()
    with Background(ALONE) as background:
        background.save(state.state_tensors(), write_to(tmp_path, 10))
        overwrite(state)
        assert newest(tmp_path) == (None, []), "it was waited for"
        gate.set()
    assert holds(tmp_path / "step-000010", live(), 10)


def test_two_saves_never_overlap(tmp_path: Path, gate) -> None:
    state = live()
    with Background(ALONE) as background:
        background.save(state.state_tensors(), write_to(tmp_path, 10))
        overwrite(state)
        second = threading.Thread(
            target=background.save, args=(state.state_tensors(), write_to(tmp_path, 20))
        )
        second.start()
        second.join(0.3)
        assert second.is_alive() and gate.waiting == 1
        gate.set()
        second.join()
    assert holds(tmp_path / "step-000010", live(), 10)
    overwritten = live()
    overwrite(overwritten)
    assert holds(tmp_path / "step-000020", overwritten, 20)


def test_a_save_allocates_nothing_that_was_reserved(tmp_path: Path) -> None:
    state = live()
    with Background(ALONE) as background:
        background.reserve(state.state_tensors)
        background.reserve(lambda: pytest.fail("reserved twice"))
        background._thread.submit(int).result()  # the thread has done what came before
        with patch("trainer.checkpoint.background._on_host", side_effect=AssertionError):
            background.save(state.state_tensors(), write_to(tmp_path, 10))
            overwrite(state)
            background.save(state.state_tensors(), write_to(tmp_path, 20))
    assert holds(tmp_path / "step-000010", live(), 10)


def test_a_run_reserves_all_that_its_first_save_copies(tmp_path: Path) -> None:
    reserve = Background.reserve
    save_all = Background.save

    def lines(entries: Sequence[StateTensor]) -> str:
        return "\n".join(f"{entry.name} {entry.key}" for entry in entries)

    def note(background: Background, entries: Callable[[], Sequence[StateTensor]]) -> None:
        (tmp_path / "reserved").write_text(lines(entries()))  # by a process of its own
        reserve(background, entries)

    def note_saved(background: Background, entries: Sequence[StateTensor], write: Any) -> None:
        (tmp_path / "saved").write_text(lines(entries))
        save_all(background, entries, write)

    job = config(tmp_path, 3, checkpoint={"asynchronous": True})
    with patch.object(Background, "reserve", note), patch.object(Background, "save", note_saved):
        trainer.train(job, **OWN)
    saved = (tmp_path / "saved").read_text()
    assert saved == (tmp_path / "reserved").read_text() and "exp_avg_sq" in saved


def test_too_little_memory_is_an_error_of_the_first_save(tmp_path: Path) -> None:
    with patch("trainer.checkpoint.background._on_host", side_effect=MemoryError("pinned")):
        background = Background(ALONE)
        background.reserve(live().state_tensors)
        with pytest.raises(MemoryError, match="pinned"):
            background.save(live().state_tensors(), write_to(tmp_path, 10))


@pytest.mark.more
def test_a_run_that_fails_meanwhile_still_publishes(tmp_path: Path, gate: threading.Event) -> None:
    with pytest.raises(ZeroDivisionError), Background(ALONE) as background:
        background.save(live().state_tensors(), write_to(tmp_path, 10))
        gate.set()
        raise ZeroDivisionError
    assert holds(tmp_path / "step-000010", live(), 10)


@pytest.mark.more
def test_a_failure_is_raised_by_the_next_save_and_once(tmp_path: Path) -> None:
    state = live()
    with Background(ALONE) as background:
        state.tensors["a.weight", "weight"][0, 0] = torch.nan
        background.save(state.state_tensors(), write_to(tmp_path, 10))
        with pytest.raises(NumericsError):
            background.save(state.state_tensors(), write_to(tmp_path, 20))
        background.save(live().state_tensors(), write_to(tmp_path, 30))
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000030"]
    with pytest.raises(NumericsError), Background(ALONE) as background:
        background.save(state.state_tensors(), write_to(tmp_path, 40))


def _save_twice(folder: Path, broken_rank: int | None) -> tuple[str, int, bool]:
    """What the first save raised, the bytes of this rank's copy, and whether the second save is
    right.
    """
    ranks, raised = Ranks(torch.distributed.get_rank(), 2), ""

    def at(phase: str) -> None:
        if phase == "flush" and ranks.rank == broken_rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Background(ranks.on_host()) as background:
        state = live(ranks)
        with patch("trainer.checkpoint.faults.at", at):
            background.save(state.state_tensors(), write_to(folder, 10))
            ranks.barrier()  # the run's own collectives go on meanwhile
            overwrite(state)
            try:
                background.wait()
            except DiskError as error:
                raised = str(error)
        background.save(live(ranks, seed=1).state_tensors(), write_to(folder, 20))
    size = sum(tensor.nbytes for tensor in background._copies.values())
    return raised, size, holds(folder / "step-000020", live(seed=1), 20, ranks)


@pytest.mark.first("None")
@pytest.mark.parametrize("broken_rank", [None, 0, 1])
def test_on_two_ranks(tmp_path: Path, pools: Pools, broken_rank: int | None) -> None:
    (one, mine, right), (other, others, also) = pools[2].run(
        _save_twice, timeout=120, folder=tmp_path, broken_rank=broken_rank
    )
    assert right and also
    assert one == other
    assert ("No space left" in one) == (broken_rank is not None)
    assert mine > 0 and others > 0
    assert mine + others == sum(tensor.nbytes for tensor in live().tensors.values())
    assert (tmp_path / "step-000010").exists() == (broken_rank is None)


def _ask(values: list[list[int]]) -> list[int]:
    ranks = Ranks(torch.distributed.get_rank(), 2).on_host()
    return [ranks.highest_soon(row[ranks.rank])() for row in values]


def test_highest_soon(pools: Pools) -> None:
    values = [[0, 0], [0, 1], [2, 1], [0, 0], [2, 2]]
    assert pools[2].run(_ask, values=values) == [[0, 1, 2, 0, 2]] * 2
    assert [ALONE.on_host().highest_soon(value)() for value in (0, 2)] == [0, 2]
