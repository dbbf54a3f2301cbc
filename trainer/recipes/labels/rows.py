"""Rows to labelled texts: what a row's columns hold, before its labels have numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.sources.formats import Row, short
from trainer.data.sources.location import Location, locate, rows_of
from trainer.data.text.chats.turns import Chat, checked_text
from trainer.data.text.preferences import kinds_of_pairs
from trainer.data.text.records import Kind, Preference, Text
from trainer.errors import DataError, NoSamples, Problem, suggestion

if TYPE_CHECKING:
    from trainer.config.sections.labels import LabelsSection
    from trainer.config.sections.model_and_data import DataSection
    from trainer.recipes.labels.kinds import Name

SEQUENCE_LABELS = ("label", "labels")
TOKEN_LABELS = ("ner_tags", "pos_tags", "tags", "labels")
WORDS = "tokens"

Label = Any
"""A label as it stands in the data; nothing is known of it before it is numbered."""
Given = str | Chat | list[str]
"""A text, a chat, or the words of a text."""


class LabelledText(NamedTuple):
    place: str
    text: Given
    other: Given | None
    """The second text of a pair, or the answer that was rejected."""
    label: Label
    """As in the data; of two answers the margin."""


class LabelColumns(NamedTuple):
    """The columns of labelled rows, as the first row has them."""

    text: str
    other: str | None
    label: str | None


def kind_in(data: DataSection, labels: LabelsSection) -> Name:
    """Return the kind of labels: the config's, or that of the first row. Raises DataError."""
    if labels.kind != "auto":
        return labels.kind
    where = locate(data.path, data.format)
    for row in rows_of(where, data, []):
        if row.error is not None:
            raise row.error
        there = row.columns
        if all(name in there for name in (data.chosen_column, data.rejected_column)):
            return "reward"
        if WORDS in there and any(name in there for name in (*TOKEN_LABELS, labels.label_column)):
            return "tokens"
        label = _columns(row, data, labels, "single").label
        assert label is not None
        return _kind_of(row, label)
    raise NoSamples(Problem(str(where), "no rows", "at least one"))


def read_rows(
    where: Location, data: DataSection, labels: LabelsSection, kind: Name
) -> Iterator[LabelledText]:
    """Yield each row with its label.

    Raises DataError for a row that can't be read, lacks a column, or holds something else in it.
    """
    columns: LabelColumns | None = None
    answers = kinds_of_pairs(data)[0]
    for row in islice(rows_of(where, data, []), data.max_rows):
        if row.error is not None:
            raise row.error
        if kind == "reward":
            yield _answers(row, answers)
            continue
        columns = columns or _columns(row, data, labels, kind)
        yield _labelled(row, columns, kind)


def _columns(row: Row, data: DataSection, labels: LabelsSection, kind: Name) -> LabelColumns:
    known = TOKEN_LABELS if kind == "tokens" else SEQUENCE_LABELS
    label = labels.label_column or next((name for name in known if name in row.columns), known[0])
    text = WORDS if kind == "tokens" and data.text_column == "text" else data.text_column
    return LabelColumns(text, labels.pair_column, label)


def _kind_of(row: Row, column: str) -> Name:
    """Return the kind of a sequence's label, by its type."""
    value = _value(row, column)
    if isinstance(value, bool | int | str):
        return "single"
    if isinstance(value, float):
        return "regression"
    if isinstance(value, list) and all(type(one) in (int, str) for one in value):
        return "multi"
    actual = f'column "{column}" holds {short(repr(value))}'
    expected = "a number or a name, or a list of those"
    hint = 'Set trainer.labels.kind: "multi" of a 0 or 1 for each class, or "regression"'
    raise DataError(Problem(row.place, actual, expected, hint))


def _labelled(row: Row, columns: LabelColumns, kind: Name) -> LabelledText:
    assert columns.label is not None
    label = _value(row, columns.label)
    if kind == "tokens":
        return LabelledText(row.place, _words(row, columns.text, label), None, label)
    other = None if columns.other is None else _text(row, columns.other)
    return LabelledText(row.place, _text(row, columns.text), other, label)


def _answers(row: Row, reader: Kind) -> LabelledText:
    """Return both answers, each with its prompt. Raises DataError."""
    pair = reader.read(row)
    if not isinstance(pair, Preference):
        raise DataError(Problem(row.place, "an answer is empty", "two answers"))
    better, worse = (
        f"{answer.prompt or ''}{answer.text}"
        if isinstance(answer, Text)
        else answer._replace(learned_from=0)
        for answer in (pair.chosen, pair.rejected)
    )
    return LabelledText(row.place, better, worse, pair.margin)


def _words(row: Row, column: str, labels: object) -> list[str]:
    words = _value(row, column)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        actual = f'column "{column}" holds {short(repr(words))}'
        raise DataError(Problem(row.place, actual, "a list of words"))
    if not isinstance(labels, list) or len(labels) != len(words):
        count = len(labels) if isinstance(labels, list) else "no list of"
        raise DataError(Problem(row.place, f"{count} labels", f"{len(words)}, one for each word"))
    return words


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        actual = f'column "{column}" holds {type(value).__name__} {short(repr(value))}'
        raise DataError(Problem(row.place, actual, "text"))
    return checked_text(row.place, value, f'column "{column}" holds ')


def _value(row: Row, column: str) -> Label:
    there: Mapping[str, object] = row.columns
    if there.get(column) is not None:
        value = there[column]
        return list(value) if isinstance(value, tuple) else value
    if column in there:
        raise DataError(Problem(row.place, f'column "{column}" holds nothing', "a value"))
    names = [str(name) for name in there]
    keys = "Set trainer.data.text_column, trainer.labels.label_column or trainer.labels.kind"
    hint = f"{suggestion(column, names)} {keys}".lstrip()
    expected = "one of " + ", ".join(f'"{name}"' for name in names)
    raise DataError(Problem(row.place, f'no column "{column}"', expected, hint))
