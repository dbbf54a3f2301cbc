"""What a run left in its folder, as far as it can be read: nothing here fails for a line or a file that is broken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import checkpoint
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout, PipelineSchedule, Recompute
from trainer.run import status, timeline
from trainer.storage import parse_json

PLAN = "plan.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run's folder in memory."""

    folder: Path
    steps: list[Row]
    """A logged step each, in order; of steps that were made again after a resume, the last."""
    replaced: list[list[Row]]
    """Stretches of logged steps that were made again."""
    evaluations: list[Row]
    timeline: list[Row]
    """Of `timeline.jsonl`, by time."""
    config: Row
    engine: str
    device: str
    layout: Layout | None
    status: Row | None
    checkpoints: list[tuple[int, float]]
    """Those that are there: the step, and when its manifest was written, in seconds since 1970."""
    predicted: tuple[float, dict[str, float]] | None
    """The memory that `plan.json` predicts, in bytes: its peak, and the share of each kind."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, for a person."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def section(self) -> Row:
        """What the config has in `trainer`."""
        found = self.config.get("trainer")
        return found if isinstance(found, dict) else {}


def read(folder: Path) -> RunRecord:
    """Raises ConfigError for a folder that is no run's."""
    if not any((folder / name).is_file() for name in ("environment.json", "metrics.jsonl", status.NAME)):
        raise ConfigError(_no_run(folder))
    notes: list[str] = []
    rows = _lines(folder / "metrics.jsonl", notes)
    logged = [row for row in rows if "loss" in row]
    kept, replaced = _last_of_each(logged)
    environment = _json(folder / "environment.json", notes)
    plan = _json(folder / PLAN, notes)
    found = RunRecord(
        folder=folder,
        steps=kept,
        replaced=replaced,
        evaluations=_last_of_each([row for row in rows if "evaluation_loss" in row])[0],
        timeline=sorted(
            (row for row in _lines(folder / timeline.NAME, notes) if _is_number(row.get("time")) and "event" in row),
            key=lambda row: float(row["time"]),
        ),
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
    """NaN for what is not there, or was not finite."""
    value = row.get(key)
    return float(value) if value is not None and _is_number(value) else math.nan


def finite(rows: Sequence[Row], key: str) -> list[float]:
    """The numbers of that name that are there, and finite."""
    return [value for row in rows if math.isfinite(value := number(row, key))]


def _no_run(folder: Path) -> Problem:
    expected = "the folder of a run that has begun"
    if not folder.is_dir():
        return Problem(str(folder), "no such folder", expected)
    inner = sorted(path.parent.name for path in folder.glob("*/environment.json"))
    mend = f"Give one of those in it: {', '.join(inner[:5])}" if inner else ""
    return Problem(str(folder), "neither environment.json nor metrics.jsonl in it", expected, mend)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _lines(path: Path, notes: list[str]) -> list[Row]:
    """The rows with a step that can be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    rows, broken = [], 0
    for line in filter(None, content.split(b"\n")):
        try:
            row = parse_json(line)
            broken += not (good := isinstance(row, dict) and type(row.get("step")) is int)
            rows += [row] if good else []
        except ValueError:
            broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} of {broken + len(rows)} lines can't be read and are left out")
    return rows


def _json(path: Path, notes: list[str]) -> Row | None:
    """A JSON object; None where there is none."""
    if not path.is_file():
        return None
    with suppress(OSError, ValueError):
        found = parse_json(path.read_bytes())
        if isinstance(found, dict):
            return found
    notes.append(f"{path.name} can't be read")
    return None


def _last_of_each(rows: Sequence[Row]) -> tuple[list[Row], list[list[Row]]]:
    """The rows with rising steps; and the stretches that a later row went back behind."""
    kept: list[Row] = []
    replaced: list[list[Row]] = []
    for row in rows:
        stretch = []
        while kept and kept[-1]["step"] >= row["step"]:
            stretch.append(kept.pop())
        replaced += [stretch[::-1]] if stretch else []
        kept.append(row)
    return kept, replaced


def _layout(folder: Path, environment: Row, notes: list[str]) -> Layout | None:
    """From environment.json, or for a run of before it was there, from the newest checkpoint."""
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
    """Of {"memory": {"peak_bytes": int, "by_kind": {kind: bytes}}}; other keys are not looked at."""
    if plan is None or "memory" not in plan:
        return None
    memory = plan["memory"]
    kinds: Any = memory.get("by_kind", {}) if isinstance(memory, dict) else None
    good = isinstance(kinds, dict) and _is_number(memory.get("peak_bytes")) and all(map(_is_number, kinds.values()))
    if not good:
        notes.append(f"{PLAN}: its memory can't be read")
        return None
    return float(memory["peak_bytes"]), {str(kind): float(count) for kind, count in kinds.items()}
