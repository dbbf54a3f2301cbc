"""Trackers: console, `metrics.jsonl`, and on request those of other projects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console as Terminal

from trainer.trackers.console import Console, progress_line, say
from trainer.trackers.jsonl import JsonLines
from trainer.trackers.services import Opened, require
from trainer.trackers.tracker import MEASURES, Epoch, Evaluation, Record, Speed, Tracker

__all__ = ["MEASURES", "Console", "Epoch", "Evaluation", "JsonLines", "Record", "Speed"]
__all__ += ["Tracker", "open_trackers", "progress_line", "require", "say"]


def open_trackers(
    names: Sequence[str], run_folder: Path, terminal: Terminal, unit: str = "tok"
) -> list[Tracker]:
    """Open rank 0's trackers: the console, with rates in `unit`, `metrics.jsonl`, and `names`."""
    always: list[Tracker] = [Console(terminal, unit), JsonLines(run_folder / "metrics.jsonl")]
    return always + [Opened(name, run_folder, partial(say, terminal)) for name in names]
