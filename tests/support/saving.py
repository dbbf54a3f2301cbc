"""A run of two processes that does little but save: what the fault tests kill, and start again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.checkpoint_pieces import DESCRIPTION, MODEL_FOLDER, Live, live, same
from trainer.checkpoint import export, load, newest, prune, save
from trainer.distributed.ranks import Ranks
from trainer.state import RunState

PHASES = ("before", "shard", "flush", "manifest", "rename", "latest", "prune")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])  # a process then starts in a tenth of the time


@dataclass(frozen=True)
class Death:
    """Have the ranks `victims` die once `rank` comes to `phase` in the save of `step`."""

    phase: str
    rank: int
    victims: tuple[int, ...]
    step: int


def state_at(step: int, ranks: Ranks | None = None) -> Live:
    """Return what training makes of the initial state."""
    state = live(ranks) if ranks else live()
    for number in range(1, step + 1):
        advance(state, number)
    return state


def advance(state: Live, step: int) -> None:
    for tensor in state.tensors.values():
        tensor.mul_(0.5 if tensor.is_floating_point() else 1).add_(step)


class Run:
    """Run both processes in `folder` up to `steps`, with a save after each; resumes."""

    def __init__(self, folder: Path, steps: int, death: Death | None = None) -> None:
        folder.mkdir(exist_ok=True)
        meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
        meeting.touch()
        self._ready: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(2):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_train, args=(folder, meeting, rank, steps, death, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ready.append(ours)
            self._processes.append(process)

    def started_from(self) -> int:
        """Wait until both train; return the step from which they resumed."""
        first, second = (int(pipe.recv()) for pipe in self._ready)
        assert first == second
        return first

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self._processes[rank].kill()

    def wait(self) -> list[int]:
        """Return the exit codes; when one has failed, kill the other, as a launcher does."""
        process: Any
        for process in self._processes:
            process.join(20)
            if process.exitcode != 0:
                break
        for process in self._processes:
            process.join(2)
            process.kill()
            process.join()
        return [process.exitcode for process in self._processes]


def _train(
    folder: Path, meeting: Path, rank: int, steps: int, death: Death | None, ready: Connection
) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}.store", rank=rank, world_size=2)
    ranks, directory = Ranks(rank, 2), folder / "checkpoints"
    pids, saving = ranks.gather(os.getpid()), [0]

    def at(phase: str) -> None:
        if death and (phase, rank, saving[0]) == (death.phase, death.rank, death.step):
            for victim in sorted(death.victims, key=rank.__eq__):  # oneself last
                os.kill(pids[victim], signal.SIGKILL)

    with patch("trainer.checkpoint.faults.at", at):
        state, position = live(ranks), RunState()
        result, damaged = newest(directory)
        if result:
            position = load(result, state.state_tensors(), ranks)
        assert not damaged
        assert same(state, state_at(position.step))
        ready.send(position.step)
        for step in range(position.step + 1, steps + 1):
            advance(state, step)
            saving[0] = step
            save(
                directory,
                replace(position, step=step, samples=step),
                state.state_tensors(),
                DESCRIPTION,
                MODEL_FOLDER,
                ranks,
            )
            ranks.on_first(lambda: prune(directory, 2))
        export(folder / "final", state.state_tensors(), MODEL_FOLDER, ranks)
    ranks.barrier()
    os._exit(0)
