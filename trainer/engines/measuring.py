"""Columns of samples that an engine measures in evaluation mode, by its own layout.

What is measured of each sample or target has a place in one long row of numbers, zeros elsewhere.
An evaluation's sum over all ranks is then the whole column. No random number is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.loader import Batching, Blank, Collate, evaluation_batches
from trainer.data.mixture import Source
from trainer.engines.engine import Engine
from trainer.models.pretrained.weights import fingerprint
from trainer.models.spec import ModelSpec, NoWeights
from trainer.storage import Json
from trainer.tasks.task import Batch


@dataclass(frozen=True)
class Placed:
    """Some samples by number, each with its place in what is measured at once."""

    source: Source
    numbers: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Json:
        return {**self.source[int(self.numbers[index])], "place": int(self.places[index])}


def measured(engine: Engine, samples: Source, collate: Collate, blank: Blank) -> torch.Tensor:
    """Return the sums of the measures of the engine's task over all samples, float64 [measures].

    Collective.
    """
    job = engine.job
    batching = Batching.of(job.layout, job.machine.ranks.rank, job.machine.device)

    def batches() -> Iterator[Batch]:
        for batch in evaluation_batches(samples, collate, blank, batching, None):
            job.machine.watch.moves()
            yield batch

    sums, _ = engine.evaluate(batches())
    return sums[1:]


def digest_of_weights(spec: ModelSpec, seed: int) -> str:
    """Return a digest of a model's values before training, pretrained or drawn from a seed."""
    weights = spec.building.weights
    if isinstance(weights, NoWeights):
        known = json.dumps([spec.config, seed], sort_keys=True, default=str)
        return hashlib.sha256(known.encode()).hexdigest()
    digest = fingerprint(weights, [name for name, _ in spec.build().named_parameters()])
    weights.release()
    return digest
