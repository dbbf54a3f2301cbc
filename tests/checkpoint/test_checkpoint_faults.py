"""Whoever dies at whatever moment of a save: the next run resumes by itself, to the weights of an
undisturbed run.
"""

from __future__ import annotations

import errno
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoint_pieces import ALONE, DESCRIPTION, MODEL_FOLDER, STATE, live, same
from tests.support.messages import shows
from tests.support.pool import Pools
from tests.support.saving import PHASES, Death, Run, state_at
from trainer.checkpoint import load, newest, prune, save
from trainer.distributed.ranks import Ranks
from trainer.errors import MeshloomError
from trainer.state import WEIGHT

STEPS = 5
PLACES = [
    *((phase, 0) for phase in PHASES),
    *((phase, 1) for phase in ("before", "shard", "flush")),
]
"""Each phase, and a rank that comes to it."""


def ends_undisturbed(folder: Path, steps: int) -> None:
    """The run in `folder` is done, and its weights and moments are those of one that nothing
    happened to.
    """
    wanted, back = state_at(steps), live().blank()
    result, skipped = newest(folder / "checkpoints")
    assert result and not skipped
    assert load(result, back.state_tensors(), ALONE).step == steps
    assert same(back, wanted)
    final = {
        name: t
        for path in (folder / "final").glob("*.safetensors")
        for name, t in load_file(path).items()
    }
    assert final.keys() == {name for name, part in wanted.tensors if part == WEIGHT}
    assert all(torch.equal(tensor, wanted.tensors[name, WEIGHT]) for name, tensor in final.items())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "latest",
        f"step-{steps - 1:06d}",
        f"step-{steps:06d}",
    ]


@pytest.mark.first("flush-0-both", "rename-0-rank 1", "prune-0-rank 0")
@pytest.mark.parametrize("victims", [(0, 1), (0,), (1,)], ids=["both", "rank 0", "rank 1"])
@pytest.mark.parametrize(("phase", "rank"), PLACES)
def test_a_death_at_each_phase_of_a_save(
    tmp_path: Path, phase: str, rank: int, victims: tuple[int, ...]
) -> None:
    died = Run(tmp_path, STEPS, Death(phase, rank, victims, step=3))
    assert died.started_from() == 0
    codes = died.wait()
    assert all(codes[victim] == -9 for victim in victims)
    assert 0 not in codes
    again = Run(tmp_path, STEPS)
    published = phase in ("latest", "prune") or (
        victims == (1,) and phase in ("manifest", "rename")
    )
    assert again.started_from() == (3 if published else 2)
    assert again.wait() == [0, 0]
    ends_undisturbed(tmp_path, STEPS)


@pytest.mark.more
def test_fifty_deaths_at_random_moments(tmp_path: Path) -> None:
    dice, step, progress, deaths, longest = random.Random(0), 0, 0, 0, 0.1
    while deaths < 50 or progress <= 20:
        run = Run(tmp_path, 10**6)
        result = run.started_from()
        # a published checkpoint was lost
        assert result >= step
        progress += result > step
        longest *= (
            1.0 if result > step else 1.1
        )  # on a slow machine deaths come later, so that they hit saves
        deaths, step = deaths + 1, result
        time.sleep(dice.uniform(0, min(longest, 5.0)))
        run.kill(*dice.choice([(0, 1), (1, 0), (0,), (1,)]))
        assert 0 not in run.wait()
    steps = int(str(newest(tmp_path / "checkpoints")[0])[-6:]) + 2
    assert Run(tmp_path, steps).wait() == [0, 0]
    ends_undisturbed(tmp_path, steps)


def _break(folder: Path, phase: str, broken_rank: int) -> str:
    """Save and prune on two ranks, one of which meets an error in `phase`; returns what this rank
    raised.
    """
    ranks = Ranks(torch.distributed.get_rank(), 2)

    def at(reached: str) -> None:
        if (reached, ranks.rank) == (phase, broken_rank):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch("trainer.checkpoint.faults.at", at):
        try:
            save(folder, STATE, live(ranks).state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks)
            ranks.on_first(lambda: prune(folder, 1))
        except MeshloomError as error:
            ranks.barrier()
            return f"{error.exit_code} {error}"
    return "nothing was raised"


@pytest.mark.first("shard-0")
@pytest.mark.parametrize(("phase", "rank"), [place for place in PLACES if place[0] != "before"])
def test_an_error_at_each_phase_is_raised_on_both(
    tmp_path: Path, pools: Pools, phase: str, rank: int
) -> None:
    older = save(
        tmp_path, replace(STATE, step=50), live().state_tensors(), DESCRIPTION, MODEL_FOLDER, ALONE
    )
    one, other = pools[2].run(_break, timeout=120, folder=tmp_path, phase=phase, broken_rank=rank)
    assert one == other
    assert one.startswith(f"74 {tmp_path}/step-")
    shows(one, "space left")
    result, skipped = newest(tmp_path)
    assert skipped == []
    assert result == (tmp_path / "step-000100" if phase in ("latest", "prune") else older)
    assert not list(tmp_path.glob("*.partial"))
    again = pools[2].run(_break, timeout=120, folder=tmp_path, phase="none", broken_rank=0)[0]
    if result != older:
        shows(again, f"74 {result}", "already published")
    else:
        assert again == "nothing was raised"


def _delay(folder: Path, slow_rank: int) -> bool:
    ranks = Ranks(torch.distributed.get_rank(), 2)
    with patch(
        "trainer.checkpoint.faults.at",
        lambda phase: time.sleep(0.02 if ranks.rank == slow_rank else 0),
    ):
        path = save(folder, STATE, live(ranks).state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks)
        prune(folder, 1) if ranks.first else None
    back = live(ranks).blank()
    return load(path, back.state_tensors(), ranks) == STATE and same(back, live())


@pytest.mark.more
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_waited_for(tmp_path: Path, pools: Pools, slow: int) -> None:
    assert pools[2].run(_delay, timeout=120, folder=tmp_path, slow_rank=slow) == [True, True]
