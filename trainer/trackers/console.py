"""Progress on the console: one line a record."""

from __future__ import annotations

import math

from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from trainer.trackers.tracker import Evaluation, Record


class Console:
    """One live line on a terminal; elsewhere a line a record. One per evaluation."""

    def __init__(self, terminal: Terminal, unit: str = "tok") -> None:
        self._terminal, self._unit = terminal, unit
        self._live: Live | None = None

    def record(self, record: Record) -> None:
        if not self._terminal.is_terminal:
            self._print(progress_line(record, self._unit))
            return
        line = Text(progress_line(record, self._unit), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(line, console=self._terminal, refresh_per_second=4)
            self._live.start()
        self._live.update(line)

    def evaluation(self, evaluation: Evaluation) -> None:
        shares = {"accuracy": evaluation.accuracy, "top-5": evaluation.accuracy_top5}
        found = "".join(f" | {name} {share:.2%}" for name, share in shares.items() if share is not None)
        found += "".join(f" | {name} {loss:.3f}" for name, loss in (evaluation.by_source or {}).items())
        line = f"step {evaluation.step} | evaluation loss {evaluation.loss:.3f}{found} | {evaluation.targets:,} targets"
        self._print(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._terminal.print(Text(line), soft_wrap=True)


def progress_line(record: Record, unit: str = "tok") -> str:
    """`step 120/150 | loss 3.214 | ETA 0:12 | lr 9.1e-4 | |g| 0.83 | 21.4k tok/s | MFU 41% | 1.9 GiB | data 0.3%`."""
    parts = [
        f"step {record.step}/{record.total_steps}",
        f"loss {record.loss:.3f}",
        f"ETA {_clock(record.eta_seconds)}",  # within the first 80 columns
        f"lr {_scientific(record.learning_rate)}",
        f"|g| {record.gradient_norm:.2f}" if record.gradient_norm is not None else "",
        f"{_thousands(record.tokens_per_second)} {unit}/s",
        f"MFU {record.mfu:.0%}" if record.mfu is not None else "",
        f"{record.memory_gib:.1f} GiB",
        f"data {record.data_wait:.1%}",
        f"scale {record.loss_scale:g}" if record.loss_scale is not None else "",
        f"skipped {record.skipped}" if record.skipped else "",
        *(f"{name} {loss:.3f}" for name, loss in (record.by_source or {}).items()),
    ]
    return " | ".join(filter(None, parts))


def _scientific(value: float) -> str:
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
