"""Trackers: console and `metrics.jsonl`, and on request TensorBoard, MLflow and Weights &
Biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console as Terminal

from trainer.trackers.console import Console, progress_line, say
from trainer.trackers.jsonl import JsonLines, SampleLog
from trainer.trackers.services import TRACKERS, require
from trainer.trackers.tracker import Evaluation, Record, Tracker

__all__ = ["TRACKERS", "Console", "Evaluation", "JsonLines", "Record", "SampleLog"]
__all__ += ["Tracker", "open_trackers", "progress_line", "require", "say"]


def open_trackers(
    names: Sequence[str], run_folder: Path, terminal: Terminal, unit: str = "tok"
) -> list[Tracker]:
    """Open the trackers of rank 0: console, with rates in `unit`, `metrics.jsonl`, and those of
    TRACKERS in `names`.
    """
    always: list[Tracker] = [Console(terminal, unit), JsonLines(run_folder / "metrics.jsonl")]
    return always + [TRACKERS[name](run_folder) for name in names]
