"""Work of the user's own script in each rank: in the processes of a launcher, or in processes
forked here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from trainer.errors import ConfigError, MeshloomError, Preempted, Problem, Stalled
from trainer.supervise.signals import StopSignals, borrowed, preempted
from trainer.supervise.world import environment_of, free_port, leave_with_launcher, world_of

T = TypeVar("T")

END_SECONDS = 5.0
"""Seconds that a process takes to end after its last message."""


def in_processes(work: Callable[[], T], processes: int | None) -> T:
    """Run `work` in each process; return rank 0's result or, under a launcher, this rank's own.

    Without a launcher, `processes` are forked, or one, so that even in a notebook all objects of
    `work` exist and this process is unchanged. Raises the error of the first rank that failed.
    """
    try:
        return _in_processes(work, processes)
    except MeshloomError as error:
        error.said_in_python()
        raise


def _in_processes(work: Callable[[], T], processes: int | None) -> T:
    launched = world_of(os.environ)
    if launched is not None:
        if processes not in (None, launched.world_size):
            actual = f"{processes} in a world of {launched.world_size} that a launcher started"
            raise ConfigError(Problem("processes", actual, "None under a launcher"))
        return work()
    count, port = processes or 1, free_port()
    return _forked(work, [environment_of(rank, count, port) for rank in range(count)])


def _forked(work: Callable[[], T], environments: Sequence[dict[str, str]]) -> T:
    _refuse_cuda()
    context = multiprocessing.get_context("fork")
    children: list[tuple[Any, Connection]] = []
    answers: dict[int, Any] = {}

    def pass_on(number: int, frame: Any) -> None:
        """Send a signal to the ranks, which save; a notebook's interrupt reaches this process
        alone.
        """
        for child, _ in children:
            if child.exitcode is None:
                os.kill(child.pid, number)

    with borrowed() as hears:
        if hears:
            StopSignals.deliver_to(pass_on)
        try:
            for environment in environments:
                ours, theirs = context.Pipe(duplex=False)
                child = context.Process(
                    target=_child, args=(work, environment, theirs), daemon=True
                )
                child.start()
                theirs.close()
                children.append((child, ours))
            while len(answers) < len(children):
                _hear(children, answers)
            return answers[0]
        finally:
            for child, _ in children:
                child.join(10 if len(answers) == len(children) else 0)
                child.kill()
                child.join()


def _hear(children: Sequence[tuple[Any, Connection]], answers: dict[int, Any]) -> None:
    """Wait for the next answers. Raises a rank's error."""
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(children) if rank not in answers}
    for pipe in wait(list(waiting)):
        assert isinstance(pipe, Connection)
        rank = waiting[pipe]
        try:
            failed, answers[rank] = pipe.recv()
        except EOFError:
            failed, answers[rank] = True, _silent_end(rank, children[rank][0])
        if failed:
            raise answers[rank]


def _silent_end(rank: int, child: Any) -> Exception:
    child.join(END_SECONDS)
    if -(child.exitcode or 0) in StopSignals.NUMBERS or child.exitcode == Preempted.exit_code:
        return preempted(0)
    if child.exitcode == Stalled.exit_code:
        actual, hint = (
            "they stood still",
            "What they waited for stands above (trainer.patience: how long a run may)",
        )
        return Stalled(Problem("processes", actual, "ranks that go on", hint))
    return RuntimeError(f"rank {rank} ended without a word, with {child.exitcode}")


def _child(work: Callable[[], Any], environment: dict[str, str], pipe: Connection) -> None:
    import torch

    for number in StopSignals.NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # the parent passes signals on
    leave_with_launcher(own=True)
    torch.set_num_threads(1)  # the parent's threads do not exist after a fork
    os.environ.update(environment)
    try:
        pipe.send((False, work()))
    except MeshloomError as error:
        pipe.send((True, error))
    except BaseException as error:
        pipe.send(
            (True, RuntimeError(f"rank {environment['RANK']}: {error}\n{traceback.format_exc()}"))
        )


def _refuse_cuda() -> None:
    import torch

    if torch.cuda.is_initialized():
        actual = "CUDA is in use in this process, which can't be forked then"
        raise ConfigError(
            Problem(
                "processes", actual, "a call before CUDA is used, or a launcher such as torchrun"
            )
        )
