"""The end of a run that fails: one of its ranks reports it, the one that failed first."""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from trainer.config import Config
from trainer.distributed.flight_record import write_flight_record
from trainer.distributed.ranks import Ranks
from trainer.errors import MeshloomError, Stalled, printable
from trainer.supervise import status_files
from trainer.supervise.notes import LEAVE_SECONDS, Notes, Whereabouts
from trainer.supervise.process import Machine
from trainer.supervise.stall import who
from trainer.supervise.watchdog.watch import Watch, WatchReports
from trainer.supervise.world import World

OTHERS_SECONDS = 4.0
"""Seconds for which a rank that lost its connection waits for the rank that knows why."""
FOLLOWS = re.compile(
    r"^rank \d+ failed:|closed by peer|reset by peer|broken pipe|timed out|wait timeout|"
    r"connection (was )?(closed|refused|aborted)|pair closure|failed to (recv|send)|socket|"
    r"NCCL|store of the ranks is gone",
    re.IGNORECASE,
)
"""Messages of libraries when another rank is gone."""


class Ending:
    def __init__(
        self, world: World, terminal: TextIO, notes: Notes | None, hush: Callable[[], object]
    ) -> None:
        """Prepare the end of this process; `hush` stops other output on the terminal."""
        self._world = world
        self._terminal = terminal
        self._notes = notes
        self._hush = hush
        self._whereabouts = Whereabouts()
        self.watch: Watch | None = None
        self.folder: Path | None = None
        self.log: Path | None = None
        """The run's folder and this rank's log, once they are known."""

    def start_watch(self, config: Config, ranks: Ranks, *slow: Callable[[str], None]) -> Watch:
        """Start the watchdog that reports and ends through this, and calls `slow`. Collective."""
        self.watch = watched(config, ranks, WatchReports(self.stalled, self.beat, *slow))
        self.watch.on_phase(self._begins)
        return self.watch

    def begin_in(self, folder: Path) -> Path:
        """Set the run's folder; return the path of this rank's log."""
        self.folder = folder
        self.log = status_files.log_of(folder, self._world.rank)
        if self._notes is not None and self._world.rank == 0:
            self._notes.write_folder(folder)
        return self.log

    def beat(self, progress: Mapping[str, object]) -> None:
        """Write this rank's status where others look for it. Raises OSError."""
        if self.folder is not None and self._world.rank == 0:
            status_files.write(self.folder, progress)

    def _begins(self, place: str) -> None:
        if self._notes is not None:
            self._notes.write_place(self._world.rank, place)
        else:
            self._whereabouts.write(place)

    def after(self, error: BaseException) -> int:
        """Report an error, or leave that to another rank; return the exit code."""
        if isinstance(error, MeshloomError):
            self.tell(error.render(), error.exit_code, shared=error.shared)
            return self.end(error.exit_code)
        where = f"; the whole traceback is in {self.log}"
        if self.log is None:
            where = "\n" + "".join(traceback.format_exception(error))
        at = f", {self.watch.place}" if self.watch else ""
        place = f"rank {self._world.rank} on {socket.gethostname()}{at}"
        text = f"internal error ({place}): {type(error).__name__}: {error}{where}"
        follows = bool(FOLLOWS.search(str(error)))
        self.tell(text, MeshloomError.exit_code, follows=follows)
        return self.end(MeshloomError.exit_code)

    def end(self, code: int) -> int:
        """Record the exit code in the run's folder, and stop the watchdog; return the code."""
        self._hush()
        if self.watch is not None:
            if code == 0 and self._notes is not None:
                self._notes.leave(self._world.rank, self.watch.place)
            # for other launchers, which would wait forever; Meshloom's has ended it before
            late = code or Stalled.exit_code
            threading.Thread(target=_end_at_last, args=(late,), daemon=True).start()
            self.watch.close()
            self._whereabouts.forget()
            with suppress(OSError):
                self.beat({**self.watch.status(), "ended": code})
        return code

    def tell(self, text: str, code: int, shared: bool = False, follows: bool = False) -> None:
        """Report the end; `shared`: all ranks report it, `follows`: another rank is the cause."""
        text = printable(text)
        self._hush()
        if self._notes is not None and self._leave_note(self._notes, text, code, follows):
            return  # the launcher, which knows how the others ended, reports it
        if shared or self._world.world_size == 1:
            if self._world.rank == 0:
                self._leave_word(text, code)
                self._print(text)
        elif self.watch is None:  # the ranks have not met
            if self._world.rank != 0:
                time.sleep(OTHERS_SECONDS)
            self._print(f"rank {self._world.rank}: {text}" if self._world.rank else text)
        elif follows:
            self._tell_first(self.watch, f"{self._lost(self.watch)}{text}", code)
        elif self._tell_first(self.watch, text, code) and self._world.rank == 0:
            # the store ends with it, and with the store the note that it has reported
            time.sleep(OTHERS_SECONDS / 2)

    def _leave_note(self, notes: Notes, text: str, code: int, follows: bool) -> bool:
        """Leave the end to this project's launcher; return False if that is gone."""
        if self.watch is not None:
            notes.write_place(self._world.rank, self.watch.place)
        return notes.write_end(self._world.rank, text, code, follows)

    def _tell_first(self, watch: Watch, text: str, code: int) -> bool:
        """Print the end, unless another rank has; return True if this one did."""
        first = watch.fails_first() and self._leave_word(text, code)
        if first:
            self._print(text)
        return first

    def _leave_word(self, text: str, code: int) -> bool:
        """Record the end in the run's folder; return False if another rank has already."""
        with suppress(OSError):  # a full disk may be the reason
            return self.folder is None or status_files.end(self.folder, code, text)
        return True

    def _lost(self, watch: Watch) -> str:
        """Wait for a rank that knows why a connection was lost; return a line on who is gone."""
        deadline = time.monotonic() + OTHERS_SECONDS
        gone = watch.gone()
        while not gone and not watch.somebody_failed() and time.monotonic() < deadline:
            time.sleep(0.2)
            gone = watch.gone()
        if not gone:
            return ""
        end = "it was killed, or exited without a report"
        if gone[0].host == socket.gethostname():
            place = self._whereabouts.of(gone[0].process) or gone[0].place
        else:
            place = f"{gone[0].place}, when it was last heard"
        return f"{who(gone)} is gone, at {place}: {end}\n  "

    def _print(self, text: str) -> None:
        print(text, file=self._terminal, flush=True)

    def stalled(self, lines: Sequence[str]) -> None:
        """Report from a thread that the run hangs, unless another rank does: without `lines`.

        The process ends after that. Its log has all stacks, and the folder `flight-PROCESS` beside
        it, of rank 0's process, the last collectives of each rank.
        """
        records = None
        if self.log is not None and self.watch is not None and self._world.world_size > 1:
            records = self.log.with_name(f"flight-{self.watch.first[1]}")
        if lines:
            last = [f"  the last collectives: torchfrtrace {records} -p rank-"]
            again = ["  run the same command again to resume"] if self.folder else []
            text = [f"{Stalled.kind}: {lines[0]}", *lines[1:], *(last if records else []), *again]
            self.tell("\n".join(text), Stalled.exit_code)
        faulthandler.dump_traceback(all_threads=True)  # into the log
        if records is not None:
            with suppress(Exception):  # it is the end of the run anyway
                write_flight_record(records, self._world.rank)
        if lines:
            self.end(Stalled.exit_code)


def _end_at_last(code: int) -> None:
    time.sleep(1.5 * LEAVE_SECONDS)
    faulthandler.dump_traceback(all_threads=True)  # into the log
    os._exit(code)


def watched(config: Config, ranks: Ranks, reports: WatchReports) -> Watch:
    """Start the watchdog of this process; `reports`: what it calls. Collective."""
    import torch.distributed as dist

    store = ranks.store() if dist.is_initialized() and ranks.world_size > 1 else None
    processes = ranks.gather((socket.gethostname(), os.getpid()))
    return Watch(ranks.rank, processes, store, config.trainer.patience, reports)


@contextmanager
def watched_in_script(config: Config, machine: Machine) -> Iterator[Machine]:
    """Yield `machine` with a watchdog, which ends a run that hangs, for a script. Collective.

    It reports on standard error. A process alone waits for nobody, and is not watched.
    """

    def stalled(lines: Sequence[str]) -> None:
        machine.signs.close()
        if not lines:
            return
        print("\n".join([f"{Stalled.kind}: {lines[0]}", *lines[1:]]), file=sys.stderr, flush=True)

    if machine.ranks.world_size == 1:
        yield machine
        return
    with closing(watched(config, machine.ranks, WatchReports(stalled))) as watch:
        yield replace(machine, watch=watch)
