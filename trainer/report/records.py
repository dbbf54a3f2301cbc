"""The record of a run from its folder, as far as it can be read: broken lines and files are no errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import checkpoint
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout, PipelineSchedule, Recompute
from trainer.run import status, timeline
from trainer.storage import check_regular, parse_json, read_file

PLAN = "plan.json"
LONGEST, MOST = 1 << 20, 8192
"""The most bytes of a line, and the most rows of a kind that are kept."""
Row = dict[str, Any]


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
    engine: str
    device: str
    layout: Layout | None
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
    def section(self) -> Row:
        """The config's `trainer` section."""
        found = self.config.get("trainer")
        return found if isinstance(found, dict) else {}


def read(folder: Path) -> RunRecord:
    """Read a run's folder. Raises ConfigError for any other folder."""
    if not any((folder / name).is_file() for name in ("environment.json", "metrics.jsonl", status.NAME)):
        raise ConfigError(_no_run(folder))
    notes: list[str] = []
    steps, evaluations = _Series("loss"), _Series("evaluation_loss")
    for row in _lines(folder / "metrics.jsonl", notes):
        for series in (steps, evaluations):
            if series.key in row:
                series.add(row)
    environment = _json(folder / "environment.json", notes)
    plan = _json(folder / PLAN, notes)
    found = RunRecord(
        folder=folder,
        steps=steps.rows,
        logged=steps.seen,
        replaced=steps.replaced,
        evaluations=evaluations.rows,
        timeline=_events(_lines(folder / timeline.NAME, notes)),
        config=_json(folder / "config.json", notes) or {},
        engine=str((environment or {}).get("engine", "")),
        device=str((environment or {}).get("device", "")),
        layout=_layout(folder, environment or {}, notes),
        status=status.read(folder),
        checkpoints=_checkpoints(folder),
        predicted=_predicted(plan, notes),
        notes=notes,
    )
    return found


def number(row: Mapping[str, Any], key: str) -> float:
    """Return the number at `key`; NaN if it is missing or was not finite."""
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
    mend = f"Give one of those in it: {', '.join(inner[:5])}" if inner else ""
    return Problem(str(folder), "neither environment.json nor metrics.jsonl in it", expected, mend)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _lines(path: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the readable rows that have a step."""
    rows = broken = 0
    with suppress(OSError):
        check_regular(path)
        with path.open("rb") as file:
            while line := file.readline(LONGEST):
                if whole := line.endswith(b"\n") or len(line) < LONGEST:
                    row = _row(line)
                    rows += row is not None
                    broken += row is None and line != b"\n"
                    yield from [] if row is None else [row]
                broken += not whole
                while not whole and (line := file.readline(LONGEST)):
                    whole = line.endswith(b"\n")
    if broken:
        notes.append(f"{path.name}: {broken} of {broken + rows} lines can't be read and are left out")


def _row(line: bytes) -> Row | None:
    with suppress(ValueError):
        row = parse_json(line)
        if isinstance(row, dict) and type(step := row.get("step")) is int and abs(step) < 1e15:
            return row
    return None


def _json(path: Path, notes: list[str]) -> Row | None:
    """Read a JSON object; None if there is none."""
    if not path.is_file():
        return None
    with suppress(OSError, ValueError):
        found = parse_json(read_file(path))
        if isinstance(found, dict):
            return found
    notes.append(f"{path.name} can't be read")
    return None


@dataclass
class _Series:
    """The rows with a number of this name, with rising steps; and the stretches that a later row repeats.

    Of many, few are kept: of each eight neighbours those with the smallest and the largest number;
    one that is not finite counts as the largest.
    """

    key: str
    rows: list[Row] = field(default_factory=list)
    replaced: list[list[Row]] = field(default_factory=list)
    seen: int = 0

    def add(self, row: Row) -> None:
        stretch = []
        while self.rows and self.rows[-1]["step"] >= row["step"]:
            stretch.append(self.rows.pop())
        self.replaced += [stretch[::-1]] if stretch else []
        self.rows.append(row)
        self.seen += 1
        if len(self.rows) > MOST:
            eights = [sorted(self.rows[at : at + 8], key=self._size) for at in range(0, MOST, 8)]
            ends = [sorted((eight[0], eight[-1]), key=lambda row: int(row["step"])) for eight in eights]
            self.rows = [row for two in ends for row in two] + self.rows[MOST:]

    def _size(self, row: Row) -> float:
        return math.inf if math.isnan(size := number(row, self.key)) else size


def _events(rows: Iterator[Row]) -> list[Row]:
    """Return the timeline's rows by time; if there are many, consecutive log lines are added up."""
    found: list[Row] = []
    most = MOST
    for row in rows:
        if _is_number(row.get("time")) and "event" in row:
            found.append(row)
        if len(found) > most:
            found = _added_up(found)
            most = max(MOST, 2 * len(found))
    return sorted(found, key=lambda row: float(row["time"]))


def _added_up(rows: list[Row]) -> list[Row]:
    """Add every second of consecutive log lines to the next."""
    found: list[Row] = []
    fresh = False
    for row in rows:
        both = [one["seconds"] for one in (*found[-1:], row) if fresh and one["event"] == "logged" and "seconds" in one]
        if fresh := not (len(both) == 2 and all(isinstance(one, dict) for one in both)):
            found.append(row)
        else:
            found[-1] = {**row, "seconds": {name: sum(finite(both, name)) for name in {**both[0], **both[1]}}}
    return found


def _layout(folder: Path, environment: Row, notes: list[str]) -> Layout | None:
    """Read the layout from environment.json or, for an older run, from the newest checkpoint."""
    found = environment.get("layout")
    saved = checkpoint.published(folder / "checkpoints")
    if found is None and saved:
        found = (_json(saved[-1] / "trainer.json", notes) or {}).get("layout")
    if found is None:
        return None
    try:
        schedule, recompute = PipelineSchedule(**found["schedule"]), Recompute(**found["recompute"])
        return Layout(**{**found, "schedule": schedule, "recompute": recompute})
    except (TypeError, KeyError, AttributeError, ConfigError):
        notes.append("the layout in environment.json can't be read")
        return None


def _checkpoints(folder: Path) -> list[tuple[int, float]]:
    found = []
    for path in checkpoint.published(folder / "checkpoints"):
        with suppress(OSError):
            found.append((checkpoint.step_of(path), (path / "manifest.json").stat().st_mtime))
    return found


def _predicted(plan: Row | None, notes: list[str]) -> tuple[float, dict[str, float]] | None:
    """Read {"memory": {"peak_bytes": int, "by_kind": {kind: bytes}}}; other keys are ignored."""
    if plan is None or "memory" not in plan:
        return None
    memory = plan["memory"]
    kinds: Any = memory.get("by_kind", {}) if isinstance(memory, dict) else None
    good = isinstance(kinds, dict) and _is_number(memory.get("peak_bytes")) and all(map(_is_number, kinds.values()))
    if not good:
        notes.append(f"{PLAN}: its memory can't be read")
        return None
    return float(memory["peak_bytes"]), {str(kind): float(count) for kind, count in kinds.items()}
