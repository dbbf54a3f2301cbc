"""When a run did what, in `timeline.jsonl`: from the host's clock alone, without a wait for the device."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType

from trainer.errors import DiskError
from trainer.trackers import JsonLines

NAME = "timeline.jsonl"
ALONE = {"evaluating": "evaluated", "saving": "saved"}
"""Phases that are told one by one, by the event that they come to; the others are added up between log lines."""
PROFILING = "profiling"
"""What the profiler takes beside the phases that it records: to begin, and to write."""


class Timeline:
    """A line a start, log line, evaluation, save and end, of the first rank; `folder` None writes nothing.

    Each has `event`, `step` (the last that was made), `time` (seconds since 1970); "start" has `steps`, what it goes
    on from in `source`, and the run's earlier lines stay before it; "logged" has the `seconds` of each phase since the
    line before; "evaluated" and "saved" their `seconds`; "end" the class of what was raised in `error`. The host's
    seconds: on a GPU a step is begun in "training", and waited for in "logging". A run that was killed has no end.
    """

    def __init__(self, folder: Path | None, steps: int, step: int, source: Path | None) -> None:
        self._lines = JsonLines(folder / NAME) if folder is not None else None
        self._phase, self._step = "", step
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._write("start", steps=steps, source=None if source is None else source.name)

    def at(self, phase: str, step: int) -> None:
        """`phase` begins, for step `step`, from 1."""
        now = time.perf_counter()
        ended, passed, self._since = self._phase, now - self._since, now
        if ended in ALONE:
            self._write(ALONE[ended], seconds=passed)
        elif ended:
            self._seconds[ended] = self._seconds.get(ended, 0.0) + passed
        if ended == "logging":
            self._write("logged", seconds=self._seconds)
            self._seconds = {}
        self._phase, self._step = phase, step - (phase in ("waiting for data", "training"))

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.at("", self._step)
        with nullcontext() if kind is None else suppress(DiskError):  # what was raised is told, not what came of it
            self._write("end", error=None if kind is None else kind.__name__)
        if self._lines is not None:
            self._lines.close()

    def _write(self, event: str, **fields: object) -> None:
        if self._lines is not None:
            self._lines.write({"event": event, "step": self._step, "time": time.time(), **fields})
