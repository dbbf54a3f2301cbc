"""A user's own data set: any object with `__len__` and `__getitem__`."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.mixture import Source, sample_of
from trainer.data.order import split
from trainer.data.values import digest_of_samples
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, Problem, listed
from trainer.storage import Json

LOOKED_AT = 32
"""The number of samples, chosen at random, that the fingerprint covers."""
BY_VALUE = "values-"
"""The beginning of a fingerprint of own data; without it, it is the digest of a pickle."""


@dataclass(frozen=True)
class Subset:
    source: Source
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> object:
        return self.source[self.indices[index]]

    def in_epoch(self, index: int, epoch: int) -> object:
        return sample_of(self.source, self.indices[index], epoch)


@dataclass(frozen=True)
class Pairs:
    """The training and evaluation data of a run with a user's own data set."""

    train: Source
    evaluation: Source | None
    fingerprint: str
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Lines for the user: what of the data a resume can't compare."""

    @property
    def evaluations(self) -> dict[str, Source]:
        return {} if self.evaluation is None else {"": self.evaluation}

    def describe(self) -> str:
        held_out = f", {len(self.evaluation):,} held out" if self.evaluation is not None else ""
        return f"{len(self.train):,} samples{held_out}"

    def description(self) -> Json:
        return {"samples": len(self.train)}


def pairs_of(data: Any, evaluation: Any, fraction: float) -> Pairs:
    """Split own data; without `evaluation` data, `fraction` of it is held out. Raises DataError."""
    for name, given in (("data", data), ("evaluation_data", evaluation)):
        if given is not None:
            check_data_set(name, given)
            if not len(given):
                raise DataError(Problem(name, "no samples", "at least one"))
    fingerprint, notes = _fingerprint(data)
    if evaluation is not None or not fraction or len(data) < 2:
        return Pairs(data, evaluation, fingerprint, notes=notes)
    train, held_out = split(len(data), fraction)
    return Pairs(Subset(data, train), Subset(data, held_out), fingerprint, notes=notes)


def check_data_set(name: str, given: object) -> None:
    """Raise DataError for an object that is no data set."""
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        actual = type(given).__name__
        expected = "an object with __len__ and __getitem__"
        raise DataError(Problem(name, actual, expected))


def check_alike(ranks: Ranks, samples: object, place: str) -> None:
    """Raise DataError unless all ranks have the same samples, by their digest. Collective."""
    if others := ranks.differing(samples):
        actual = f"other samples on rank {', '.join(map(str, others))} than on rank 0"
        same = "the same files, and the same versions of Python and the tokenizer"
        raise DataError(Problem(place, actual, f"{same}, on every machine"))


def _fingerprint(data: Source) -> tuple[str, tuple[str, ...]]:
    """Hash the number of samples and some of them, which shows most changes; return notes, too."""
    unknown: set[str] = set()
    # not evenly spaced: that would see one digit of what is counted
    looked_at = random.Random(0).sample(range(len(data)), min(LOOKED_AT, len(data)))
    digests = digest_of_samples(data.__getitem__, looked_at, unknown)
    digest = hashlib.sha256(str(len(data)).encode() + (digests or b"")).hexdigest()
    return f"{BY_VALUE}{digest}", notes_on(digests is None, unknown)


def notes_on(varies: bool, unknown: set[str]) -> tuple[str, ...]:
    """Return notes on what a resume does not compare of own data."""
    resume = "a resumed run notices"
    if varies:
        return (f"samples differ from reading to reading: {resume} only if their number changes",)
    if unknown:
        names = listed(sorted(unknown))
        return (f"{resume} no change in values of {names}: they can't be compared by value",)
    return ()
