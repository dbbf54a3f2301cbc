"""Rows to texts: an anchor, a positive and any number of negatives, found by their columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.data.sources.formats import Row, short
from trainer.errors import DataError, Problem

ANCHORS = ("anchor", "query", "question", "sentence1")
POSITIVES = ("positive", "pos", "answer", "document", "sentence2")
NEGATIVES = re.compile(r"negative(_\d+)?|negatives|neg")
"""The names by which columns are known: those of sentence-transformers' data sets, and of BGE's."""
KEY = "trainer.embeddings.columns"


@dataclass(frozen=True)
class Columns:
    """The columns of anchor, positive and negatives, in this order."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, row: Row, options: EmbeddingsSection) -> Columns:
        """Return the columns that the config names, or that the first row has.

        Raises DataError for a row without an anchor and a positive, or with two of one.
        """
        if options.columns:
            return cls(tuple(options.columns))
        known = list(row.columns)
        ends = [
            _only(row, [name for name in known if name in kind]) for kind in (ANCHORS, POSITIVES)
        ]
        negatives = [name for name in known if NEGATIVES.fullmatch(name)]
        return cls((*ends, *sorted(negatives, key=_natural)))

    def texts(self, row: Row, limit: int | None) -> list[str]:
        """Return a row's texts, its negatives cut to `limit`, if it has a list of them.

        Raises DataError for a column that is missing or empty, or holds anything else.
        """
        if row.error is not None:
            raise row.error
        anchor, positive, *negatives = (list(_texts(row, name)) for name in self.names)
        for name, texts in ((self.names[0], anchor), (self.names[1], positive)):
            if len(texts) != 1:
                raise DataError(Problem(row.place, f'{len(texts)} texts in "{name}"', "one"))
        others = [text for column in negatives for text in column]
        return [*anchor, *positive, *others[:limit]]


def check_columns(options: EmbeddingsSection) -> None:
    """Raise DataError for fewer than two columns, or one that is named twice."""
    names = options.columns
    if names and (len(names) < 2 or len({*names}) < len(names)):
        expected = "the columns of anchor and positive, then those of negatives"
        raise DataError(Problem(KEY, f"saw {', '.join(names)}", expected))


def _natural(name: str) -> tuple[str, int]:
    stem, _, number = name.partition("_")
    return stem, int(number or 0)


def _only(row: Row, names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    actual = " and ".join(names) if names else f"the columns {', '.join(row.columns) or 'none'}"
    expected = f"one of {', '.join(ANCHORS)}, and one of {', '.join(POSITIVES)}"
    raise DataError(Problem(row.place, actual, expected, f"Set {KEY}"))


def _texts(row: Row, name: str) -> Iterator[str]:
    if name not in row.columns:
        expected = f"the columns {', '.join(row.columns)}"
        raise DataError(Problem(row.place, f'no column "{name}"', expected, f"Set {KEY}"))
    value = row.columns[name]
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str) or not text.strip():
            actual = f'column "{name}" holds {short(repr(text))}'
            raise DataError(Problem(row.place, actual, "a text that is not empty"))
        yield text
