"""The check that the data's token ids and sequence length fit a model."""

from __future__ import annotations

from trainer.errors import ConfigError, DataError, Problem
from trainer.models.spec import ModelSpec


def check_fit(spec: ModelSpec, largest: int, sequence: int) -> None:
    """Raise DataError or ConfigError unless a model has all token ids and positions of the data.

    `largest`: the largest token id; `sequence`: the number of tokens of a sequence.
    """
    check_ids(spec.name, spec.language.vocabulary, largest)
    positions = spec.language.positions
    if positions is not None and sequence > positions:
        expected = f"at most the model's {positions} positions"
        raise ConfigError(Problem("trainer.data.sequence_length", str(sequence), expected))


def check_ids(name: str, ids: int, largest: int) -> None:
    """Raise DataError unless the data's `largest` token id is below the model's number of `ids`."""
    if largest >= ids:
        expected = f"ids below {ids}, the rows of the embedding of {name}"
        own = "Use the model's own tokenizer (trainer.data.tokenizer)"
        hint = f"{own}, or a vocab_size that holds all ids"
        raise DataError(Problem("tokenizer", f"the data has token id {largest}", expected, hint))
