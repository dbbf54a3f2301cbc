"""A user's own data set: any object with `__len__` and `__getitem__`."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.mixture import Source, sample_of
from trainer.data.order import split
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, Problem

LOOKED_AT = 16
"""The number of samples, evenly spaced, that the fingerprint covers."""


@dataclass(frozen=True)
class Subset:
    source: Source
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.source[self.indices[index]]

    def in_epoch(self, index: int, epoch: int) -> Any:
        return sample_of(self.source, self.indices[index], epoch)


@dataclass(frozen=True)
class Pairs:
    """The training and evaluation data of a run with a user's own data set."""

    train: Source
    evaluation: Source | None
    fingerprint: str

    @property
    def evaluations(self) -> dict[str, Source]:
        return {} if self.evaluation is None else {"": self.evaluation}

    def describe(self) -> str:
        held = f", {len(self.evaluation):,} held out" if self.evaluation is not None else ""
        return f"{len(self.train):,} samples{held}"

    def description(self) -> dict[str, Any]:
        return {"samples": len(self.train)}


def pairs_of(data: Any, evaluation: Any, fraction: float) -> Pairs:
    """Split own data; without `evaluation` data, `fraction` of it is held out. Raises DataError."""
    for name, given in (("data", data), ("evaluation_data", evaluation)):
        if given is not None:
            check_data_set(name, given)
            if not len(given):
                raise DataError(Problem(name, "no samples", "at least one"))
    fingerprint = _fingerprint(data)
    if evaluation is not None or not fraction or len(data) < 2:
        return Pairs(data, evaluation, fingerprint)
    train, held = split(len(data), fraction)
    return Pairs(Subset(data, train), Subset(data, held), fingerprint)


def check_data_set(name: str, given: Any) -> None:
    """Raise DataError for an object that is no data set."""
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        seen, expected = type(given).__name__, "an object with __len__ and __getitem__"
        raise DataError(Problem(name, seen, expected))


def check_alike(ranks: Ranks, samples: Any, place: str) -> None:
    """Raise DataError unless all ranks have the same samples, by their digest. Collective."""
    if others := ranks.differing(samples):
        seen = f"other samples on rank {', '.join(map(str, others))} than on rank 0"
        same = "the same files, and the same versions of Python and the tokenizer"
        raise DataError(Problem(place, seen, f"{same}, on every machine"))


def _fingerprint(data: Any) -> str:
    """Hash the number of samples and some of them, which shows most changes."""
    digest = hashlib.sha256(str(len(data)).encode())
    for index in range(0, len(data), max(1, len(data) // LOOKED_AT)):
        digest.update(pickle.dumps(data[index]))
    return digest.hexdigest()
