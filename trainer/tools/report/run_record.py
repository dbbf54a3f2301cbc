"""The record of a run, read from its folder. Broken lines and files are noted, not raised."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from trainer import checkpoint
from trainer.errors import ConfigError, Problem
from trainer.run.observers import timeline
from trainer.run.start.folder import PLAN
from trainer.storage import Json, check_regular, json_in, parse_json
from trainer.supervise import status_files

LONGEST = 1 << 20
MOST = 8192
"""The most bytes of a line, and the most rows of a kind that are kept."""
NUMBER = rb"-?\d{1,20}(?:\.\d{1,30})?(?:e[+-]?\d{1,3})?"
STEP = re.compile(rb'\{"step": (\d{1,14}), .{0,200}?"loss": (%b)[,}]' % NUMBER)
"""A step's line as a run writes it: to parse a million of them as JSON takes long."""
Row = Json
_Line = tuple[int, float, bytes]
T = TypeVar("T")


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder."""

    folder: Path
    steps: list[Row]
    """A row for each logged step, in order; of steps repeated after a resume, the last."""
    logged: int
    """The number of lines of steps; if there are many, only some are rows."""
    replaced: list[list[Row]]
    """Stretches of logged steps that were repeated later."""
    evaluations: list[Row]
    timeline: list[Row]
    """The rows of `timeline.jsonl`, sorted by time."""
    config: Row
    environment: Row
    status: Row | None
    checkpoints: list[tuple[int, float]]
    """The present checkpoints: step, and time of the manifest, in seconds since 1970."""
    predicted: tuple[float, dict[str, float]] | None
    """The memory that `plan.json` predicts, in bytes: its peak, and the part of each kind."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user on what could not be read."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def device(self) -> str:
        return str(self.environment.get("device", ""))

    @property
    def unit(self) -> str:
        """The plural of what rates count; "targets" for an older run, which did not record it."""
        return str(self.environment.get("unit", "targets"))

    @property
    def section(self) -> Row:
        """The config's `trainer` section."""
        section = self.config.get("trainer")
        return section if isinstance(section, dict) else {}


def read(folder: Path) -> RunRecord:
    """Read a run's folder. Raises ConfigError for any other folder."""
    signs = ("environment.json", "metrics.jsonl", status_files.NAME)
    if not any((folder / name).is_file() for name in signs):
        raise ConfigError(_no_run(folder))
    notes: list[str] = []
    steps = _Series()
    evaluations = _Series()
    series = {"loss": steps, "evaluation_loss": evaluations}
    for losses in _lines(folder / "metrics.jsonl", _losses, notes):
        for key, line in losses:
            series[key].add(line)
    environment = _json(folder / "environment.json", notes)
    plan = _json(folder / PLAN, notes)
    return RunRecord(
        folder=folder,
        steps=_rows(steps.lines),
        logged=steps.count,
        replaced=list(filter(None, map(_rows, steps.replaced))),
        evaluations=_rows(evaluations.lines),
        timeline=_events(_lines(folder / timeline.NAME, _row, notes)),
        config=_json(folder / "config.json", notes) or {},
        environment=environment or {},
        status=status_files.read(folder),
        checkpoints=_checkpoints(folder),
        predicted=_predicted(plan, notes),
        notes=notes,
    )


def number(row: Row, key: str) -> float:
    """Return the number at `key`; NaN if there is none or it was not finite."""
    value = row.get(key)
    return float(value) if value is not None and _is_number(value) else math.nan


def finite(rows: Sequence[Row], key: str) -> list[float]:
    """Return the finite numbers at `key`."""
    return [value for row in rows if math.isfinite(value := number(row, key))]


def _no_run(folder: Path) -> Problem:
    expected = "the folder of a run that has begun"
    if not folder.is_dir():
        return Problem(str(folder), "no such folder", expected)
    inner = sorted(path.parent.name for path in folder.glob("*/environment.json"))
    hint = f"Give one of the runs in it: {', '.join(inner[:5])}" if inner else ""
    return Problem(str(folder), "neither environment.json nor metrics.jsonl in it", expected, hint)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _lines(path: Path, read: Callable[[bytes], T | None], notes: list[str]) -> Iterator[T]:
    """Yield what `read` makes of each line; it returns None for one that can't be read."""
    good = broken = 0
    with suppress(OSError):
        check_regular(path)
        with path.open("rb") as file:
            for line in _bounded(file):
                content = None if line is None else read(line)
                if content is not None:
                    good += 1
                    yield content
                elif line != b"\n":
                    broken += 1
    if broken:
        count = f"{broken} of {broken + good} lines"
        notes.append(f"{path.name}: {count} can't be read and are left out")


def _bounded(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield each line; None for one of LONGEST bytes or more."""
    while line := file.readline(LONGEST):
        if line.endswith(b"\n") or len(line) < LONGEST:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST)
        yield None


def _row(line: bytes) -> Row | None:
    """Parse a row that has a step; None for anything else."""
    with suppress(ValueError):
        row = parse_json(line)
        if isinstance(row, dict) and type(step := row.get("step")) is int and abs(step) < 1e15:
            return row
    return None


def _losses(line: bytes) -> list[tuple[str, _Line]] | None:
    """Return the losses in a line, by their keys, each with its step and the line.

    Infinity stands for a loss that is not finite. None for a line that can't be read.
    """
    if (step := STEP.match(line)) and line.endswith(b"}\n") and b'"evaluation_loss"' not in line:
        return [("loss", (int(step[1]), float(step[2]), line))]
    if (row := _row(line)) is None:
        return None
    sizes = [(key, number(row, key)) for key in ("loss", "evaluation_loss") if key in row]
    return [
        (key, (row["step"], math.inf if math.isnan(size) else size, line)) for key, size in sizes
    ]


def _rows(lines: Sequence[_Line]) -> list[Row]:
    return [row for _, _, line in lines if (row := _row(line)) is not None]


def _json(path: Path, notes: list[str]) -> Row | None:
    """Read a JSON object; None if there is none."""
    content = json_in(path)
    if isinstance(content, dict):
        return content
    if path.is_file():
        notes.append(f"{path.name} can't be read")
    return None


@dataclass
class _Series:
    """The lines with a loss of one kind, by rising step, and the stretches that later lines repeat.

    Of more than MOST, only the lines with the smallest and the largest loss of each eight
    neighbours are kept; a loss that is not finite counts as the largest. A line is kept as bytes,
    and parsed at the end.
    """

    lines: list[_Line] = field(default_factory=list)
    replaced: list[list[_Line]] = field(default_factory=list)
    count: int = 0

    def add(self, line: _Line) -> None:
        stretch = []
        while self.lines and self.lines[-1][0] >= line[0]:
            stretch.append(self.lines.pop())
        self.replaced += [stretch[::-1]] if stretch else []
        self.lines.append(line)
        self.count += 1
        if len(self.lines) > MOST:
            kept: list[_Line] = []
            for at in range(0, MOST, 8):
                by_loss = sorted(self.lines[at : at + 8], key=itemgetter(1))
                kept += sorted((by_loss[0], by_loss[-1]))
            self.lines = kept + self.lines[MOST:]


def _events(rows: Iterator[Row]) -> list[Row]:
    """Return the timeline's rows by time; if there are many, consecutive log lines are added up."""
    events: list[Row] = []
    most = MOST
    for row in rows:
        if _is_number(row.get("time")) and isinstance(row.get("event"), str):
            events.append(row)
        if len(events) > most:
            events = _added_up(events)
            most = max(MOST, 2 * len(events))
    return sorted(events, key=lambda row: float(row["time"]))


def _added_up(rows: list[Row]) -> list[Row]:
    """Merge consecutive log lines in pairs: the later one gets the sum of their seconds."""
    added: list[Row] = []
    fresh = False  # the last row is one of `rows`, and no sum
    for row in rows:
        before: Row = added[-1] if fresh else {}
        whole: Any = before.get("seconds")
        part: Any = row.get("seconds")
        logged = before.get("event") == row["event"] == "logged"
        fresh = not (logged and isinstance(whole, dict) and isinstance(part, dict))
        if fresh:
            added.append(row)
        else:
            sums = dict(whole)
            for name, seconds in part.items():
                sums[name] = sum(filter(_is_number, (whole.get(name), seconds)))
            added[-1] = {**row, "seconds": sums}
    return added


def _checkpoints(folder: Path) -> list[tuple[int, float]]:
    saved = []
    for path in checkpoint.published(folder / "checkpoints"):
        with suppress(OSError):
            saved.append((checkpoint.step_of(path), (path / "manifest.json").stat().st_mtime))
    return saved


def _predicted(plan: Row | None, notes: list[str]) -> tuple[float, dict[str, float]] | None:
    """Read {"memory": {"peak_bytes": int, "by_kind": {kind: bytes}}}; None if there is no such."""
    if plan is None or "memory" not in plan:
        return None
    memory: dict[str, object] = plan["memory"] if isinstance(plan["memory"], dict) else {}
    peak: Any = memory.get("peak_bytes")
    kinds: object = memory.get("by_kind", {})
    if not isinstance(kinds, dict) or not all(map(_is_number, (peak, *kinds.values()))):
        notes.append(f"{PLAN}: its memory can't be read")
        return None
    return float(peak), {str(kind): float(count) for kind, count in kinds.items()}
