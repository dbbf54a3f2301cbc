"""Progress on the console: a line for each record, epoch and evaluation."""

from __future__ import annotations

import math
from textwrap import TextWrapper
from typing import Any

from rich.console import Console as Terminal

from trainer.errors import printable
from trainer.trackers.tracker import Epoch, Evaluation, Record

HANGING = " " * len("layout  ")


def say(console: Terminal, line: str) -> None:
    """Print a line; on a terminal, a longer one is broken between words and continues below."""
    text = printable(line)
    if console.is_terminal:
        # a path stays whole, to be copied
        whole: Any = dict.fromkeys(("break_long_words", "break_on_hyphens", "expand_tabs"), False)
        lines = TextWrapper(console.width, "", HANGING, replace_whitespace=False, **whole)
        text = "\n".join(map(lines.fill, text.split("\n")))
    console.print(text, markup=False, soft_wrap=True)


class Console:
    def __init__(self, terminal: Terminal, unit: str = "tok") -> None:
        self._terminal = terminal
        self._unit = unit

    def record(self, record: Record) -> None:
        say(self._terminal, progress_line(record, self._unit))

    def epoch(self, epoch: Epoch) -> None:
        say(self._terminal, f"Epoch [{epoch.number}/{epoch.total:.16g}], Loss: {epoch.loss:.4f}")

    def evaluation(self, evaluation: Evaluation) -> None:
        shares = {"accuracy": evaluation.accuracy, "top-5": evaluation.accuracy_top5}
        parts = [
            f"step {evaluation.step}",
            f"evaluation loss {evaluation.loss:.3f}",
            *(f"{name} {share:.2%}" for name, share in shares.items() if share is not None),
            *(f"{name} {loss:.3f}" for name, loss in (evaluation.by_source or {}).items()),
            *(f"{name} {value:.4g}" for name, value in evaluation.metrics.items()),
            f"{evaluation.targets:,} targets",
        ]
        say(self._terminal, " | ".join(parts))

    def close(self) -> None: ...


def progress_line(record: Record, unit: str = "tok") -> str:
    """Format a line such as `step 120/150 | loss 3.214 | ETA 0:12 | ... | data 0.3%`."""
    parts = [
        f"step {record.step}/{record.total_steps}",
        f"loss {record.loss:.3f}",
        f"ETA {_clock(record.speed.eta_seconds)}",  # within the first 80 columns
        f"lr {scientific(record.learning_rate)}",
        f"|g| {record.gradient_norm:.2f}" if record.gradient_norm is not None else "",
        f"{_thousands(record.speed.tokens_per_second)} {unit}/s",
        f"MFU {record.speed.mfu:.0%}" if record.speed.mfu is not None else "",
        f"{record.memory_gib:.1f} GiB",
        f"data {record.speed.data_wait:.1%}",
        f"scale {record.loss_scale:g}" if record.loss_scale is not None else "",
        f"skipped {record.skipped}" if record.skipped else "",
        *(f"{name} {loss:.3f}" for name, loss in (record.by_source or {}).items()),
        *(f"{name} {value:.4g}" for name, value in record.metrics.items()),
    ]
    return " | ".join(filter(None, parts))


def scientific(value: float, position: float = 0.0) -> str:
    """Format a number, also for an axis of a picture: 4e-3."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent and value else f"{value:g}"


def _thousands(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
