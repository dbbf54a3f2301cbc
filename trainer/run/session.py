"""A run in one process: all that it has beside its config, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from trainer.config import Config
from trainer.config.sections.trainer import CheckpointSection
from trainer.data.progress import Progress
from trainer.distributed.ranks import Ranks
from trainer.engines import Machine
from trainer.run.start.choose import as_begun, choose
from trainer.run.start.folder import FINAL, not_pushed
from trainer.run.start.request import Request, Start
from trainer.supervise.output import Signs
from trainer.supervise.signals import Signals
from trainer.supervise.stall import Phase
from trainer.supervise.watchdog.watch import Watch
from trainer.trackers import Tracker, say

SLOW_NETWORK = 1e5
"""The lowest speed of an upload, in bytes/s, that is no hang."""


def in_no_log(folder: Path) -> None:
    """Keep no log: a script's output is its own."""


@dataclass(frozen=True)
class Session:
    """The request and the means of a run; with `begin`, its folder, too.

    Every rank has one. What is collective says so.
    """

    request: Request
    machine: Machine
    console: Console
    signals: Signals
    trackers: Sequence[Tracker] = ()
    """Those of every rank; the first has those of the config, too."""
    log_in: Callable[[Path], None] = in_no_log
    """Takes the run's folder, in which the log continues."""
    chosen: Start | None = None
    """The folder and the checkpoint, once they are chosen."""
    publish: Callable[[Path], str] | None = None
    """Pushes the model in a run's folder to the Hub and returns its address; None without one."""

    @property
    def ranks(self) -> Ranks:
        return self.machine.ranks

    @property
    def start(self) -> Start:
        assert self.chosen is not None, "a session has a folder once it has begun"
        return self.chosen

    @property
    def folder(self) -> Path:
        return self.start.folder

    @property
    def progress(self) -> Progress:
        return Progress(self.console, self.machine.watch.moves, self.machine.signs)

    def watched_by(self, watch: Watch, signs: Signs) -> Session:
        """Return the session whose phases these show."""
        return replace(self, machine=replace(self.machine, watch=watch, signs=signs))

    def say(self, line: str) -> None:
        """Print a line that stays; on the first rank alone, by its console."""
        say(self.console, line)

    def enter(self, phase: Phase, seconds: float | None = None) -> None:
        """Tell the watchdog of a phase, which may take so many seconds without a sign of life."""
        self.machine.watch.at(phase)
        if seconds is not None:
            self.machine.watch.moves(seconds)

    def begin(self, config: Config) -> tuple[Session, Config]:
        """Choose the run's folder; return the session in it, and the config as the run began.

        Collective; raises as `choose`, and HubError.
        """
        start = choose(config, self.request, self.ranks, self.progress)
        if not start.finished or start.upload is not None or start.pushes:
            self.log_in(start.folder)
        config = as_begun(config, start)
        ranks = start.ranks
        publish = None
        hub = config.trainer.hub
        if hub is not None and (start.pushes or not start.finished):
            self.machine.signs.at("looking at the repository on the Hub")
            open_hub = self.request.open_hub
            publish = ranks.on_own(lambda: open_hub(hub) if ranks.first else str)
        machine = replace(self.machine, ranks=ranks)
        return replace(self, machine=machine, chosen=start, publish=publish), config

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Have all ranks copy large files to the copy elsewhere, if there is one, until the end."""
        upload = self.start.upload if self.ranks.world_size > 1 else None
        if upload is None:
            yield
            return
        upload.share(self.ranks.rank, self.ranks.world_size, self.ranks.store())
        try:
            yield
        finally:
            upload.stop_sharing()

    def copy_what_waits(self) -> None:
        """Begin to copy in the background what an earlier process has not copied."""
        if self.start.upload is not None and self.ranks.first:
            self.start.upload.soon(self.say)

    def copy_all(self, section: CheckpointSection) -> None:
        """Bring the copy elsewhere up to date, if there is one. Collective; raises DiskError."""
        upload = self.start.upload
        if upload is None:
            return
        self.say(f"copying what is missing to {section.upload}")

        def moved(count: int) -> None:
            self.machine.watch.moves()

        def finish() -> str:
            return upload.finish(moved, (section.keep_last, section.keep_best))

        self.say(f"copied: {self.ranks.await_first(finish)}")

    def push(self) -> None:
        """Push the final model to the Hub, if the config names one. Collective; raises HubError."""
        publish = self.publish
        folder = self.folder
        if publish is None:
            return
        self.enter(Phase.FINISHING)
        if self.ranks.first:
            self.signals.saved(not_pushed(folder, "a signal ended the push").share())
        self.say(f"pushing {folder / FINAL} to the Hub")
        self.machine.watch.moves(self.ranks.on_first(lambda: _bytes_in(folder)) / SLOW_NETWORK)
        self.say(f"pushed: {self.ranks.await_first(lambda: publish(folder))}")

    def complete(self, section: CheckpointSection) -> None:
        """Copy and push what of a finished run is not elsewhere yet; then say that it is finished.
        Collective.
        """
        self.machine.signs.hide()
        self.enter(Phase.FINISHING)
        self.copy_all(section)
        self.push()
        again = "--fresh starts a new run, and more trainer.steps continue it"
        place = f"{self.folder / FINAL} is there already"
        self.say(f"finished: {place}; {again} with --resume auto")


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/**/*") if path.is_file())
