"""The documents of a certificate, and the path by which a run reads samples from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.certify.tiny_run import LONGEST, Tiny
from trainer.data.text.token_files import Encoded, write_part
from trainer.models.spec import ModelSpec
from trainer.models.tiny_config import SIZES, Sizes

LONGEST_ROW, LOGITS, PARAMETERS = 4096, 1 << 25, 24_000_000
"""The most tokens of a sample, entries of its logits, and parameters: seconds of a CPU."""
FEW = 97
"""The number of tokens among which half are drawn: a frequent token gets gradients from many
places.
"""


class Documents(NamedTuple):
    """Documents of different lengths, one too long for a sample, with very unequal numbers of
    targets.
    """

    training: list[Encoded]
    held_out: list[Encoded]
    """One more document than is evaluated."""


def with_copy(small: Tiny, plain: ModelSpec, packed: bool) -> tuple[Tiny, ModelSpec]:
    """Make the model's tiny copy, and a sample as long as the run's, if it can be computed."""
    layers, split = max(2, small.layout.stages + 1), small.layout.tensor  # a block more than stages
    assert plain.tiny.copy is not None
    known, few = plain.language.vocabulary, SIZES.vocabulary
    least, twice = (plain.tiny.copy(layers, split, Sizes(ids)).parameters for ids in (few, 2 * few))
    vocabulary = min(known, few + max(0, PARAMETERS - least) * few // max(1, twice - least))
    wanted: int = small.config.trainer.data.sequence_length
    most = min(plain.language.positions or wanted, LONGEST_ROW, LOGITS // vocabulary)
    row = max(LONGEST, min(wanted, LONGEST if packed else most))
    rows = f"a row of {row:,} tokens, the others of at most {LONGEST}"
    changes = f"{rows}; ids up to {vocabulary - 1:,}"
    if vocabulary < known:
        changes += f" (the model has {known:,}: it proves less of them)"
    if row < wanted:
        changes += f" (rows of the run have {wanted:,}: it proves less of them)"
    sizes = Sizes(vocabulary, max(SIZES.positions, row + 1))  # one more: RoBERTa's kin count from 1
    copy = plain.tiny.copy(layers, split, sizes)
    return replace(small, row=row, changes=(*small.changes, changes)), copy


def documents_of(small: Tiny, vocabulary: int, packed: bool = False) -> Documents:
    """Draw one and a half steps of documents, so that steps span the ends of epochs; the same on
    every rank.

    They use as much of the vocabulary as there is room for, with its last token. There are twice as
    many if they are to be packed: fewer than two on average fit in a sample.
    """
    rng = np.random.default_rng(0)

    def draw(count: int, longest: int) -> list[Encoded]:
        lengths = rng.integers(4, LONGEST + 6, 2 * count if packed else count)
        lengths[1] = longest
        total = int(lengths.sum())
        every = np.resize(np.append(vocabulary - 1, 1 + rng.permutation(vocabulary - 2)), total)
        tokens = np.where(
            rng.random(total) < 0.5, rng.integers(1, min(FEW, vocabulary), total), every
        )
        tokens[lengths[0] + 1] = vocabulary - 1
        return [
            # a third of them has a single target
            Encoded.from_token(
                own.tolist(), min(len(own), small.row + 1) - 1 if i % 3 == 0 else 1 + i % 2
            )
            for i, own in enumerate(np.split(tokens, np.cumsum(lengths)[:-1]))
        ]

    training = draw(small.layout.train_batch * 3 // 2 + 1, small.row + 6)
    return Documents(training, draw(small.held_out + 1, LONGEST + 6))


def write(documents: Documents, row: int, folder: Path, packed: bool = False) -> None:
    for name, part in documents._asdict().items():
        write_part(folder / name, part, row, "pack" if packed else "pad")
