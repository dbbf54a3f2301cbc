"""`trainer.profile`: some steps of the first rank, recorded by PyTorch's profiler into the run's folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.config.sections import ProfileSection
from trainer.run.timeline import PROFILE, TRACE
from trainer.storage import disk_errors
from trainer.supervise.phase import Phase

PREFIX = "meshloom: "
"""The beginning of a phase's name in the trace."""


class StepProfiler:
    """Records the steps in `wanted`, and writes them once the last is over.

    `profile/trace-rank-0.json.gz` is for Perfetto or chrome://tracing.
    """

    def __init__(self, wanted: ProfileSection, run_folder: Path, device: torch.device) -> None:
        self._first, self._last = wanted.start, wanted.start + wanted.steps - 1
        self._folder, self._device = run_folder / PROFILE, device
        self._profile: Any = None
        self._phase = ExitStack()

    def at(self, phase: Phase, step: int) -> None:
        """Begin `phase` of step `step`, from 1."""
        self._phase.close()
        if step > self._last:
            self.close()
        elif step >= self._first:
            if self._profile is None:
                kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
                self._profile = profile(activities=kinds)
                self._profile.start()
            self._phase.enter_context(record_function(PREFIX + phase))

    def close(self) -> None:
        """Write the record, if there is any. Raises DiskError."""
        self._phase.close()
        if self._profile is None:
            return
        ended, self._profile = self._profile, None
        ended.stop()
        with disk_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
            ended.export_chrome_trace(str(self._folder / TRACE))
