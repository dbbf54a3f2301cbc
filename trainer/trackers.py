"""What a person watches: one line on the console, `metrics.jsonl` always, TensorBoard and MLflow on request."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from trainer.checkpoint.disk import disk_errors
from trainer.errors import ConfigError, Problem


@dataclass(frozen=True)
class Record:
    """One logged step. Rates and shares are over the steps since the record before."""

    step: int
    total_steps: int
    samples: int
    tokens: int
    """Target tokens since the start of the run."""
    loss: float
    """Nats per target token."""
    learning_rate: float
    gradient_norm: float | None
    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    """Share of the device's peak FLOP/s, 0 to 1; None where the peak is not known."""
    memory_gib: float
    """Peak, on this rank's device."""
    data_wait: float
    """Share of the time spent waiting for data, 0 to 1."""
    eta_seconds: float
    loss_scale: float | None = None
    skipped: int | None = None
    """Steps skipped since the start of the run, for a gradient that was not finite."""


@dataclass(frozen=True)
class Evaluation:
    """The held-out loss after `step` steps, in nats per target."""

    step: int
    loss: float
    targets: int


class Tracker(Protocol):
    def record(self, record: Record) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...


def open_trackers(names: Sequence[str], run_folder: Path, terminal: Terminal) -> list[Tracker]:
    """The trackers of rank 0: console and `metrics.jsonl`, and those of TRACKERS that are named."""
    always: list[Tracker] = [Console(terminal), JsonLines(run_folder / "metrics.jsonl")]
    return always + [TRACKERS[name](run_folder) for name in names]


# On the console


class Console:
    """One live line on a terminal; elsewhere at most PLAIN_LINES lines of progress, and one per evaluation."""

    PLAIN_LINES = 15

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._live: Live | None = None
        self._next_step = 0

    def record(self, record: Record) -> None:
        if not self._terminal.is_terminal:
            self._plain(record)
            return
        line = Text(progress_line(record), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(line, console=self._terminal, refresh_per_second=4)
            self._live.start()
        self._live.update(line)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._print(f"step {evaluation.step} | evaluation loss {evaluation.loss:.3f} | {evaluation.targets:,} targets")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _plain(self, record: Record) -> None:
        if record.step >= self._next_step:
            self._print(progress_line(record))
            # one line for each of these shares of the run; the first line and the last step's come on top
            shares = self.PLAIN_LINES - 2
            done = record.step * shares // record.total_steps
            self._next_step = -(-(done + 1) * record.total_steps // shares)

    def _print(self, line: str) -> None:
        self._terminal.print(Text(line), soft_wrap=True)


def progress_line(record: Record) -> str:
    """`step 120/150 | loss 3.214 | lr 9.1e-4 | |g| 0.83 | 21.4k tok/s | MFU 41% | 1.9 GiB | data 0.3% | ETA 0:12`."""
    parts = [
        f"step {record.step}/{record.total_steps}",
        f"loss {record.loss:.3f}",
        f"lr {_scientific(record.learning_rate)}",
        f"|g| {record.gradient_norm:.2f}" if record.gradient_norm is not None else "",
        f"{_thousands(record.tokens_per_second)} tok/s",
        f"MFU {record.mfu:.0%}" if record.mfu is not None else "",
        f"{record.memory_gib:.1f} GiB",
        f"data {record.data_wait:.1%}",
        f"scale {record.loss_scale:g}" if record.loss_scale is not None else "",
        f"skipped {record.skipped}" if record.skipped else "",
        f"ETA {_clock(record.eta_seconds)}",
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


# In files


class JsonLines:
    """One JSON object per line, flushed at once; goes on after what is there.

    JSON has no NaN: such a number is null, and stands as text in the line's `non_finite`.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, fields: Mapping[str, Any]) -> None:
        floats = {key: value for key, value in fields.items() if isinstance(value, float)}
        odd = {key: str(value) for key, value in floats.items() if not math.isfinite(value)}
        line = {key: None if key in odd else value for key, value in fields.items()}
        with disk_errors(self._path):
            self._file.write(json.dumps(line | ({"non_finite": odd} if odd else {})) + "\n")
            self._file.flush()

    def record(self, record: Record) -> None:
        self.write(_fields(record))

    def evaluation(self, evaluation: Evaluation) -> None:
        self.write(_fields(evaluation))

    def close(self) -> None:
        with suppress(OSError):  # a line that the disk did not take: told when it was written
            self._file.close()


class SampleLog:
    """Which samples this rank trained on, in `FOLDER/samples-rank-N.jsonl`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._lines = JsonLines(folder / f"samples-rank-{rank}.jsonl")

    def write(self, step: int, ids: Sequence[int]) -> None:
        self._lines.write({"step": step, "rank": self._rank, "ids": list(ids)})

    def close(self) -> None:
        self._lines.close()


def _cut_torn_line(path: Path) -> None:
    """Remove what a killed run left after the last whole line."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


# In other people's tools


class TensorBoard:
    """Event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def record(self, record: Record) -> None:
        self._add(record)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._add(evaluation)

    def close(self) -> None:
        self._writer.close()

    def _add(self, item: Record | Evaluation) -> None:
        for key, value in _numbers(item).items():
            self._writer.add_scalar(key, value, item.step)


class MLflow:
    """A run `name` in `FOLDER/mlflow.db`, or on the server that MLflow is configured for."""

    def __init__(self, folder: Path, name: str) -> None:
        import mlflow
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        for chatty in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        local = None if mlflow.is_tracking_uri_set() else f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=local)
        found = self._client.get_experiment_by_name(_EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(_EXPERIMENT)
        self._run = self._client.create_run(experiment, run_name=name).info.run_id

    def record(self, record: Record) -> None:
        self._log(record)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._log(evaluation)

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _log(self, item: Record | Evaluation) -> None:
        now = round(time.time() * 1000)
        metrics = [self._metric(key, value, now, item.step) for key, value in _numbers(item).items()]
        self._client.log_batch(self._run, metrics=metrics)


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": lambda run_folder: TensorBoard(run_folder / "tensorboard"),
    "mlflow": lambda run_folder: MLflow(run_folder, run_folder.name),
}
"""Those that `trainer.log.trackers` may name; each is the extra of the distribution that installs it."""

_PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
_EXPERIMENT = "meshloom"


def require(names: Sequence[str]) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    for name in names:
        missing = [package for package in _PACKAGES[name] if find_spec(package) is None]
        if missing:
            seen = f'"{name}" without the package {missing[0]}'
            mend = f"pip install meshloom[{name}]"
            raise ConfigError(Problem("trainer.log.trackers", seen, "trackers that are installed", mend))


def _fields(item: Record | Evaluation) -> dict[str, Any]:
    """What is known of a record, by the names under which it is logged."""
    prefix = "evaluation_" if isinstance(item, Evaluation) else ""
    known = {key: value for key, value in asdict(item).items() if value is not None and key != "step"}
    return {"step": item.step} | {prefix + key: value for key, value in known.items()}


def _numbers(item: Record | Evaluation) -> dict[str, float]:
    return {key: float(value) for key, value in _fields(item).items() if key not in ("step", "total_steps")}


# What a device can do

PEAK_FLOPS = {
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense 16-bit FLOP/s by words of the device's name, from the vendors' data sheets; the narrower name comes first."""


def peak_flops(device_name: str) -> float | None:
    """The peak of a device such as `NVIDIA H100 80GB HBM3` in FLOP/s (bfloat16, or float16 where it has none)."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((peak for name, peak in PEAK_FLOPS.items() if words >= set(name.split())), None)
