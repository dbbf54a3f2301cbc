"""The options of a start, and the folder and checkpoint that were chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from trainer.checkpoint.copies.upload import Upload
from trainer.config.sections.trainer import HubSection
from trainer.distributed.ranks import ALONE, Ranks
from trainer.engines import Machine
from trainer.run.prepare import BEGINS, Begun, ChooseRecompute, Prepared, recompute_nothing
from trainer.trackers.callbacks import Callback

MemoryCheck = Callable[[Prepared, Machine, Path, Console], Callable[[], Sequence[str]]]
"""Raises ConfigError if a run does not fit; what it returns compares at the end. Collective."""


@dataclass(frozen=True)
class Planner:
    """The planner's functions, which commands hand to a run, as nothing else imports tools."""

    check_memory: MemoryCheck = lambda *_: list
    choose_recompute: ChooseRecompute = recompute_nothing


@dataclass(frozen=True)
class Request:
    """The options of the command line besides the config, and its planner."""

    resume: str | None = None
    """A checkpoint's path, or "auto": the newest of the newest run, whatever its config."""
    fresh: bool = False
    """True to start a new run even if the last one was not finished."""
    resume_anyway: bool = False
    """True to resume even if data, tokenizer, model or code changed."""
    weights_only: bool = False
    """True to resume with a new optimizer."""
    dry_run: bool = False
    preview: int | None = None
    """The number of samples to show, without training; None to train."""
    teacher_only: bool = False
    """True to measure what comes before the run's own model, and to end."""
    overrides: Sequence[str] = ()
    script: bool = False
    """True if called from Python: a finished run is then repeated, in another folder."""
    planner: Planner = Planner()
    open_hub: Callable[[HubSection], Callable[[Path], str]] = lambda section: str
    """Checks a repository; what it returns pushes a run's folder there, and returns the address."""
    callbacks: Sequence[Callback] = ()

    @property
    def trains(self) -> bool:
        return not (self.dry_run or self.teacher_only) and self.preview is None

    @property
    def path(self) -> Path | None:
        """The checkpoint to resume from, if one is given."""
        return None if self.resume in (None, "auto") else Path(str(self.resume))


@dataclass(frozen=True)
class Start:
    """The folder of a run, and the checkpoint it resumes from."""

    folder: Path
    source: Path | None = None
    """The checkpoint, complete and verified; None: from the beginning."""
    lines: list[str] = field(default_factory=list)
    """Lines for the user."""
    finished: bool = False
    """True if the model is in its folder, and what is left to do is to copy and to push it."""
    ranks: Ranks = ALONE
    """The ranks, with the first rank of each node's folder."""
    begun: Begun = BEGINS
    """The order and the engine of the run until now."""
    upload: Upload | None = None
    """The copy of the run elsewhere, of which the first rank takes care, and to which all write;
    None if there is none, or if the run is finished and the copy is whole."""
    pushes: bool = False
    """True if the run is finished, and its model is not on the Hub yet."""
