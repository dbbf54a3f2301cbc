"""The documents that a certificate is made on, and the path by which a run gets its samples of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.certify.small import LONGEST, Small
from trainer.data.source import Encoded, PreparedSource, write_part


class Documents(NamedTuple):
    """Ragged, some longer than a sample, and with very unequal numbers of targets."""

    training: list[Encoded]
    held_out: list[Encoded]
    """One more than is evaluated."""


def documents_of(small: Small, vocabulary: int, packed: bool = False) -> Documents:
    """One and a half steps of them, so that steps lie across the ends of epochs; the same on every rank.

    Twice as many where they are to be packed: fewer than two on average fit in a sample.
    """
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[Encoded]:
        lengths = rng.integers(4, LONGEST + 6, 2 * count if packed else count)
        return [
            # a third of them has a single target
            Encoded.from_token(
                rng.integers(1, vocabulary, n).tolist(), min(n, LONGEST + 1) - 1 if i % 3 == 0 else 1 + i % 2
            )
            for i, n in enumerate(int(length) for length in lengths)
        ]

    return Documents(draw(small.layout.train_batch * 3 // 2 + 1), draw(small.held_out + 1))


def write(documents: Documents, folder: Path, packed: bool = False) -> None:
    for name, part in documents._asdict().items():
        write_part(folder / name, part, LONGEST, "pack" if packed else "pad")


def source(folder: Path, name: str) -> PreparedSource:
    """What `write` wrote there."""
    return PreparedSource(folder / name)
