"""Forked ranks, and the work of a user's script in each rank, forked here or under a launcher."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar, cast

from trainer.errors import ConfigError, MeshloomError, Problem, Stalled, Stopped
from trainer.supervise.signals import StopSignals, borrowed, stopped_early
from trainer.supervise.world import environment_of, leave_with_launcher, reserved_port, world_of

T = TypeVar("T")

END_SECONDS = 5.0
"""Seconds that a process may take to end after its last message."""


class ForkedRank(ForkProcess):
    """A forked child, which leaves with this process and has the methods of `subprocess.Popen`."""

    wait = ForkProcess.join
    returncode = ForkProcess.exitcode

    def __init__(self, work: Callable[[], object], environment: Mapping[str, str]) -> None:
        super().__init__(target=work, daemon=False)  # a daemon may not have processes of its own
        self._environment = environment
        self.start()

    def run(self) -> None:
        StopSignals.deliver_to(signal.SIG_DFL)
        os.environ.update(self._environment)
        leave_with_launcher(own=True)
        super().run()

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid or 0, number)


class _ScriptRank(ForkedRank):
    """A rank that sends the result of the script's `work`, or its error."""

    def __init__(self, work: Callable[[], object], environment: Mapping[str, str]) -> None:
        self.heard = False
        self.result: Any = None
        self.pipe, theirs = Pipe(duplex=False)
        super().__init__(partial(_send_outcome, work, theirs), environment)
        theirs.close()

    def hear(self) -> None:
        """Take the result. Raises the error of a rank that failed."""
        try:
            failed, self.result = self.pipe.recv()
        except EOFError:
            failed = True
            self.result = self._silent_end()
        self.heard = True
        if failed:
            raise self.result

    def _silent_end(self) -> Exception:
        self.join(END_SECONDS)
        number = -(self.exitcode or 0)
        if number in StopSignals.NUMBERS:
            return stopped_early(number)
        if self.exitcode == Stopped.exit_code:
            return stopped_early(0)
        if self.exitcode == Stalled.exit_code:
            hint = "The lines above say what they waited for (trainer.patience: how long a run may)"
            return Stalled(Problem("processes", "they hang", hint=hint))
        rank = self._environment["RANK"]
        return RuntimeError(f"rank {rank} ended without a report, with exit code {self.exitcode}")


def _send_outcome(work: Callable[[], object], pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)  # the parent's threads do not exist after a fork
    try:
        if torch.cuda._is_in_bad_fork() and torch.cuda.is_available():
            actual = "forks of one that has used CUDA or looked for GPUs: CUDA fails in them"
            expected = "`import trainer` first and no CUDA before the call"
            raise ConfigError(Problem("processes", actual, f"{expected}, or a launcher (torchrun)"))
        pipe.send((False, work()))
    except MeshloomError as error:
        pipe.send((True, error))
    except BaseException as error:
        text = f"rank {os.environ['RANK']}: {error}\n{traceback.format_exc()}"
        pipe.send((True, RuntimeError(text)))


def in_processes(work: Callable[[], T], processes: int | None, **environment: str) -> T:
    """Run `work` in each process; return rank 0's result or, under a launcher, this rank's own.

    Without a launcher, `processes` are forked, or one, so that even in a notebook all objects of
    `work` exist and this process is unchanged; `environment` is added to theirs. Raises the error
    of the first rank that failed.
    """
    try:
        if (launched := world_of(os.environ)) is None:
            return _in_forks(work, processes or 1, environment)
        if processes not in (None, launched.world_size):
            actual = f"{processes} in a world of {launched.world_size} that a launcher started"
            raise ConfigError(Problem("processes", actual, "None under a launcher"))
        return work()
    except MeshloomError as error:
        error.reword_for_python()
        raise


def _in_forks(work: Callable[[], T], count: int, environment: dict[str, str]) -> T:
    ranks: list[_ScriptRank] = []

    def pass_on(number: int, frame: object) -> None:
        """Send a signal to the ranks; a notebook's interrupt reaches this process alone."""
        for rank in ranks:
            rank.send_signal(number)

    with ExitStack() as stack:
        if stack.enter_context(borrowed()):
            StopSignals.deliver_to(pass_on)
        port = stack.enter_context(reserved_port())
        try:
            for number in range(count):
                ranks.append(_ScriptRank(work, environment_of(number, count, port) | environment))
            while waiting := {rank.pipe: rank for rank in ranks if not rank.heard}:
                for pipe in wait(list(waiting)):
                    waiting[cast(Connection, pipe)].hear()
            return cast(T, ranks[0].result)
        finally:
            seconds = 10 if all(rank.heard for rank in ranks) else 0
            for rank in ranks:
                rank.join(seconds)
                rank.kill()
                rank.join()
