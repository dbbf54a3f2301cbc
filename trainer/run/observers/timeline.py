"""The times of a run's phases, by the host's clock alone, and a profile of some of its steps."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.sections.trainer import ProfileSection
from trainer.errors import DiskError
from trainer.storage import disk_errors
from trainer.supervise.stall import Phase
from trainer.trackers import JsonLines

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

NAME = "timeline.jsonl"
PROFILE = "profile"
TRACE = "trace-rank-0.json.gz"
"""In the run's folder: the lines, and the folder of `trainer.profile` with its file."""
ALONE = {Phase.EVALUATING: "evaluated", Phase.SAVING: "saved"}
"""Phases that have a line each, by its event; the others are summed between log lines."""


class Timeline:
    """Writes a line for each start, log line, evaluation, save and end, on the first rank; nothing
    if `folder` is None.

    Each has `event`, `step` (the last that was taken), `time` (seconds since 1970); "start" has
    `steps`, and in `source` the checkpoint it resumes from, after the run's earlier lines; "logged"
    has the `seconds` of each phase since the last line; "evaluated" and "saved" have their
    `seconds`; "end" has the class of the exception in `error`. Seconds are the host's: on a GPU a
    step is launched in "training", and waited for in "logging". A killed run has no end.
    """

    def __init__(self, folder: Path | None, steps: int, step: int, source: Path | None) -> None:
        self._lines = JsonLines(folder / NAME) if folder is not None else None
        self._phase: Phase | None = None
        self._step = step
        self._since = time.perf_counter()
        self._seconds: dict[Phase, float] = {}
        self._write("start", steps=steps, source=None if source is None else source.name)

    def at(self, phase: Phase | None, step: int) -> None:
        """Begin `phase` of step `step`, from 1."""
        now = time.perf_counter()
        ended = self._phase
        passed = now - self._since
        self._since = now
        if ended in ALONE:
            self._write(ALONE[ended], seconds=passed)
        elif ended:
            self._seconds[ended] = self._seconds.get(ended, 0.0) + passed
        if ended is Phase.LOGGING:
            self._write("logged", seconds=self._seconds)
            self._seconds = {}
        self._phase = phase
        self._step = step - (phase in (Phase.WAITING, Phase.TRAINING))

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.at(None, self._step)
        # the original error is reported, not this one
        with nullcontext() if kind is None else suppress(DiskError):
            self._write("end", error=None if kind is None else kind.__name__)
        if self._lines is not None:
            self._lines.close()

    def _write(self, event: str, **fields: object) -> None:
        if self._lines is not None:
            self._lines.write({"event": event, "step": self._step, "time": time.time(), **fields})


PREFIX = "meshloom: "
"""The beginning of a phase's name in the trace."""


class StepProfiler:
    """Records the steps in `wanted`, and writes them once the last is over.

    `profile/trace-rank-0.json.gz` is for Perfetto or chrome://tracing.
    """

    def __init__(self, wanted: ProfileSection, run_folder: Path, device: torch.device) -> None:
        self._first = wanted.start
        self._last = wanted.start + wanted.steps - 1
        self._folder = run_folder / PROFILE
        self._device = device
        self._profile: profile | None = None
        self._phase = ExitStack()

    def at(self, phase: Phase, step: int) -> None:
        """Begin `phase` of step `step`, from 1."""
        # late: the report needs no torch
        from torch.profiler import ProfilerActivity, profile, record_function

        self._phase.close()
        if step > self._last:
            self.close()
        elif step >= self._first:
            if self._profile is None:
                kinds = [ProfilerActivity.CPU]
                if self._device.type == "cuda":
                    kinds.append(ProfilerActivity.CUDA)
                self._profile = profile(activities=kinds)
                self._profile.start()
            self._phase.enter_context(record_function(PREFIX + phase))

    def close(self) -> None:
        """Write the record, if there is any. Raises DiskError."""
        self._phase.close()
        if self._profile is None:
            return
        ended = self._profile
        self._profile = None
        ended.stop()
        with disk_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
            ended.export_chrome_trace(str(self._folder / TRACE))
