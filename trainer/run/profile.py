"""`trainer.profile`: some steps of the first rank, recorded by PyTorch's profiler into the run's folder."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.config.sections import ProfileSection
from trainer.storage import disk_errors, replace_file

FOLDER, SUMMARY, TRACE = "profile", "summary.json", "trace-rank-0.json.gz"
PREFIX = "meshloom: "
"""Before the name of a phase in the trace."""


class StepProfiler:
    """Records the steps that `wanted` names, and writes them once the last of them is over.

    `FOLDER/trace-rank-0.json.gz` is for chrome://tracing or Perfetto. `summary.json` has a row for each operator:
    `name`, `calls`, and microseconds, `host` and `device` with what it calls, `self_host` and `self_device` without.
    """

    def __init__(self, wanted: ProfileSection, run_folder: Path, device: torch.device) -> None:
        self._first, self._last = wanted.start, wanted.start + wanted.steps - 1
        self._folder, self._device = run_folder / FOLDER, device
        self._recorded: list[int] = []
        self._profile: Any = None
        self._phase = ExitStack()

    def at(self, phase: str, step: int) -> None:
        """`phase` begins, for step `step`, from 1."""
        self._phase.close()
        if step > self._last:
            self.close()
        elif step >= self._first:
            if self._profile is None:
                kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
                self._profile = profile(activities=kinds)
                self._profile.start()
            self._recorded += [step] if step not in self._recorded else []
            self._phase.enter_context(record_function(PREFIX + phase))

    def close(self) -> None:
        """Writes what was recorded, if anything was. Raises DiskError."""
        self._phase.close()
        if self._profile is None:
            return
        ended, self._profile = self._profile, None
        ended.stop()
        with disk_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
            ended.export_chrome_trace(str(self._folder / TRACE))
            found = {"steps": self._recorded, "device": self._device.type, "operators": _rows(ended)}
            replace_file(self._folder / SUMMARY, (json.dumps(found) + "\n").encode())
        self._recorded = []


def _rows(ended: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": event.key,
            "calls": event.count,
            "host": event.cpu_time_total,
            "self_host": event.self_cpu_time_total,
            "device": event.device_time_total,
            "self_device": event.self_device_time_total,
        }
        for event in ended.key_averages()
        if event.device_type == DeviceType.CPU  # a kernel's time is that of the operator that began it, too
    ]
