"""The column of a teacher: its likeliest tokens at each target of the data, and their log p.

It is computed once by a layout of the teacher in evaluation mode, which draws no random number,
and kept in a folder, sealed: ids int32, log p float32, of k tokens 8 k + 4 bytes a target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data import columns
from trainer.data.loader import Batching
from trainer.data.text.prepared import Data
from trainer.data.text.token_files import PreparedSource
from trainer.engines import Engine
from trainer.engines.measuring import Placed, measured
from trainer.recipes.distillation.task import DistillationTask
from trainer.storage import Json
from trainer.tasks.task import IGNORED

FOLDER = "teacher"
NUMBERS = 1 << 22
"""The numbers that are measured at once, if a micro-batch of each rank has no more."""
EXPECTED = "what is known of the teacher of this run"
HINT = (
    "Name the teacher, and remove the folder if it is there: it is then made again. "
    "Or name another trainer.distillation.column."
)


class LikelyTokens(NamedTuple):
    """The likeliest tokens of the teacher at the targets of a sample, in order."""

    ids: np.ndarray
    """int32 [targets, k]."""
    logs: np.ndarray
    """log p of each, and of all other tokens together, float32 [targets, k + 1]."""

    def none(self) -> LikelyTokens:
        """Return the same of a sample without targets."""
        return LikelyTokens(self.ids[:0], self.logs[:0])


class TeacherColumn:
    """The teacher's likeliest tokens at the targets of each sample of a part of the data."""

    def __init__(self, starts: np.ndarray, ids: np.ndarray, logs: np.ndarray) -> None:
        """`starts` [samples + 1]: the row of each sample's first target."""
        self._starts = np.asarray(starts)
        self._ids = ids
        self._logs = logs

    def __getitem__(self, index: int) -> LikelyTokens:
        rows = slice(*self._starts[index : index + 2].tolist())
        return LikelyTokens(np.array(self._ids[rows]), np.array(self._logs[rows]))


def parts_of(data: Data) -> dict[str, PreparedSource]:
    """Return the parts of the data, by a name for each."""
    parts = {f"train {share.label}".rstrip(): share.source for share in data.shares}
    return parts | {f"evaluation {name}".rstrip(): part for name, part in data.evaluations.items()}


def measure(
    engine: Engine, task: DistillationTask, source: PreparedSource
) -> Iterator[tuple[LikelyTokens, np.ndarray]]:
    """Yield what an engine's model says of the samples, with their numbers of targets: some at a
    time, in order. Collective.
    """
    layout = engine.job.layout
    batching = Batching.of(layout, engine.job.machine.ranks.rank, engine.job.machine.device)
    together = batching.micro_batch * batching.data_ranks
    start = 0
    while start < len(source):
        counts: list[int] = []
        # whole rounds of micro-batches, at least one
        while start + len(counts) < len(source) and (
            len(counts) % together or sum(counts) * task.width < NUMBERS
        ):
            targets = source[start + len(counts)]["targets"]
            counts.append(int((targets != IGNORED).sum()))
        yield _of_some(engine, task, source, start, np.array(counts)), np.array(counts)
        start += len(counts)


def _of_some(
    engine: Engine, task: DistillationTask, source: PreparedSource, start: int, counts: np.ndarray
) -> LikelyTokens:
    numbers = np.arange(start, start + len(counts))
    placed = Placed(source, numbers, np.cumsum(counts) - counts)
    count = task.keys.top_k
    with task.measuring_columns(max(1, int(counts.sum()))):
        rows = measured(engine, placed, task.collate, task.blank).view(-1, task.width)
    rows = rows[: int(counts.sum())]
    ids = rows[:, :count].int().cpu().numpy()
    return LikelyTokens(ids, rows[:, count:].float().cpu().numpy())


def arrays_of(
    engine: Engine, task: DistillationTask, parts: Mapping[str, PreparedSource]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of each part's column by name, some rows at a time. Collective."""
    for name, part in parts.items():
        yield f"{name} starts", np.zeros(1, np.int64)
        total = 0
        for known, counts in measure(engine, task, part):
            yield f"{name} ids", known.ids
            yield f"{name} logs", known.logs
            yield f"{name} starts", total + np.cumsum(counts)
            total += int(counts.sum())


def write(place: Path, known: Json, arrays: Iterator[tuple[str, np.ndarray]], writes: bool) -> None:
    """Write a column as it is measured; ranks that do not write take part alone. Collective."""
    if writes:
        columns.write(place, known, arrays)
    else:
        for _ in arrays:
            pass


def read(place: Path, known: Json, parts: Mapping[str, PreparedSource]) -> None:
    """Add a column to the samples of each part.

    Raises DataError if it is missing, damaged, or of another teacher, data or settings.
    """
    arrays = columns.read(place, known, EXPECTED, HINT)
    for name, part in parts.items():
        own = (arrays[f"{name} {kind}"] for kind in ("starts", "ids", "logs"))
        part.add_column("teacher", TeacherColumn(*own))
