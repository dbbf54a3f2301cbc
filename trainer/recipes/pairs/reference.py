"""The reference of preference losses: the log-probabilities of the model before training.

They are computed once, by the run's own layout in evaluation mode, which draws no random number,
and kept in the run's folder: a resumed run, whose weights have been trained, reads them. No
second model is ever in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.loader import Batching, evaluation_batches
from trainer.data.mixture import Source
from trainer.data.sealed import flaw, seal
from trainer.data.text.token_files import PreparedPairs
from trainer.engines import Engine
from trainer.errors import DataError, Problem
from trainer.models.pretrained.weights import fingerprint
from trainer.models.spec import NoWeights
from trainer.recipes.pairs.task import PairsTask
from trainer.storage import Json, disk_errors, json_in, rename_folder, write_file
from trainer.tasks.task import Batch

FOLDER = "reference"
FILE = "reference.json"
CHUNK = 1024
"""The most pairs whose values are measured at once."""


@dataclass(frozen=True)
class Placed:
    """Some pairs by number, each with its place in what is measured at once."""

    source: Source
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Json:
        return {**self.source[int(self.numbers[place])], "place": place}


def log_probabilities(
    engine: Engine, task: PairsTask, source: Source, numbers: np.ndarray
) -> np.ndarray:
    """Return the log-probabilities of both answers of pairs, float64 [pairs, 2]. Collective."""
    job = engine.job
    batching = Batching.of(job.layout, job.machine.ranks.rank, job.machine.device)
    parts = []

    def batches(chunk: Placed) -> Iterator[Batch]:
        for batch in evaluation_batches(chunk, task.collate, task.blank, batching, None):
            job.machine.watch.moves()
            yield batch

    for start in range(0, len(numbers), CHUNK):
        chunk = Placed(source, numbers[start : start + CHUNK])
        with task.measuring_columns(len(chunk)):
            sums, _ = engine.evaluate(batches(chunk))
        parts.append(sums[1:].cpu().numpy().reshape(-1, 2))
    return np.concatenate(parts) if parts else np.zeros((0, 2))


def identity(engine: Engine, parts: Mapping[str, PreparedPairs]) -> Json:
    """Return what a reference was computed of: its weights, data and precision."""
    spec = engine.job.spec
    weights = spec.building.weights
    names = [name for name, _ in spec.build().named_parameters()]
    if isinstance(weights, NoWeights):
        known = json.dumps([spec.config, engine.job.seed], sort_keys=True, default=str)
        digest = hashlib.sha256(known.encode()).hexdigest()
    else:
        digest = fingerprint(weights, names)
        weights.release()
    return {
        "weights": digest,
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


def write(folder: Path, known: Json, columns: Mapping[str, np.ndarray]) -> None:
    """Write a reference into a run's folder, where it appears whole. Raises DiskError."""
    partial = folder / f".partial-{FOLDER}"
    with disk_errors(folder / FOLDER):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files = {name: f"{number}.npy" for number, name in enumerate(columns)}
        for name, column in columns.items():
            content = io.BytesIO()
            np.save(content, column, allow_pickle=False)
            write_file(partial / files[name], content.getvalue())
        write_file(partial / FILE, json.dumps({**known, "files": files}, indent=1).encode())
        seal(partial)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        rename_folder(partial, folder / FOLDER)


def read(folder: Path, known: Json) -> dict[str, np.ndarray]:
    """Read the reference of a run that is resumed.

    Raises DataError if it is missing, damaged, or of other weights, data or precision.
    """
    place = folder / FOLDER
    expected = "the reference that was computed before this run's first step"
    hint = "Copy it from where the run began, or start a new run with --fresh."
    if problem := flaw(place, rest=False):
        raise DataError(Problem(str(place), problem, expected, hint))
    written = json_in(place / FILE)
    for name, value in known.items():
        if written.get(name) != value:
            actual = f"it was computed of other {name}"
            raise DataError(
                Problem(str(place), actual, f"those of this run: {_short(value)}", hint)
            )
    return {
        name: np.load(place / file, allow_pickle=False) for name, file in written["files"].items()
    }


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
