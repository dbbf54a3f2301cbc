"""The reference of preference losses: the log-probabilities of the model before training.

They are computed once, by the run's own layout in evaluation mode, which draws no random number,
and kept in the run's folder: a resumed run, whose weights have been trained, reads them. No
second model is ever in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainer.data import columns
from trainer.data.columns import Columns
from trainer.data.mixture import Source
from trainer.data.text.token_files import PreparedPairs
from trainer.engines import Engine
from trainer.engines.measuring import Placed, digest_of_weights, measured
from trainer.recipes.pairs.task import PairsTask
from trainer.storage import Json

FOLDER = "reference"
CHUNK = 1024
"""The most pairs whose values are measured at once."""
EXPECTED = "the reference that was computed before this run's first step"
HINT = "Copy it from where the run began, or start a new run with --fresh."


def log_probabilities(
    engine: Engine, task: PairsTask, source: Source, numbers: np.ndarray
) -> np.ndarray:
    """Return the log-probabilities of both answers of pairs, float64 [pairs, 2]. Collective."""
    parts = []
    for start in range(0, len(numbers), CHUNK):
        some = numbers[start : start + CHUNK]
        with task.measuring_columns(len(some)):
            placed = Placed(source, some, np.arange(len(some)))
            sums = measured(engine, placed, task.collate, task.blank)
        parts.append(sums.cpu().numpy().reshape(-1, 2))
    return np.concatenate(parts) if parts else np.zeros((0, 2))


def identity(engine: Engine, parts: Mapping[str, PreparedPairs]) -> Json:
    """Return what a reference was computed of: its weights, data and precision."""
    return {
        "weights": digest_of_weights(engine.job.spec, engine.job.seed),
        "precision": engine.job.layout.precision,
        "data": {name: part.summary.fingerprint for name, part in parts.items()},
    }


def compute(
    engine: Engine, task: PairsTask, parts: Mapping[str, PreparedPairs]
) -> dict[str, np.ndarray]:
    """Compute the reference of each part, by name. Collective."""
    return {
        name: log_probabilities(engine, task, part, np.arange(len(part)))
        for name, part in parts.items()
    }


def write(folder: Path, known: Json, computed: Columns) -> None:
    """Write a reference into a run's folder, where it appears whole. Raises DiskError."""
    columns.write(folder / FOLDER, known, computed.items())


def read(folder: Path, known: Json) -> Columns:
    """Read the reference of a run that is resumed.

    Raises DataError if it is missing, damaged, or of other weights, data or precision.
    """
    known_columns = columns.read(folder / FOLDER, known, EXPECTED, HINT)
    return {name: np.array(column) for name, column in known_columns.items()}
