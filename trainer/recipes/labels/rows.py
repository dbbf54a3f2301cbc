"""Rows to labelled texts: what a row's columns hold, before its labels have numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.sources.formats import Row, short
from trainer.data.sources.location import Location, locate, rows_of
from trainer.data.text.chats.turns import Chat, check_turns, checked_text, messages_of, tools_of
from trainer.errors import DataError, NoSamples, Problem, suggestion

if TYPE_CHECKING:
    from trainer.config.sections.labels import LabelsSection
    from trainer.config.sections.model_and_data import DataSection
    from trainer.recipes.labels.kinds import Name

SEQUENCE_LABELS = ("label", "labels")
TOKEN_LABELS = ("ner_tags", "pos_tags", "tags", "labels")
ANSWERS = ("chosen", "rejected")
WORDS = "tokens"

Given = str | Chat | list[str]
"""A text, a chat, or the words of a text."""


class LabelledText(NamedTuple):
    place: str
    text: Given
    other: Given | None
    """The second text of a pair, or the answer that was rejected."""
    label: Any
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
        if all(name in there for name in ANSWERS):
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
    for row in islice(rows_of(where, data, []), data.max_rows):
        if row.error is not None:
            raise row.error
        columns = columns or _columns(row, data, labels, kind)
        yield _labelled(row, columns, kind)


def _columns(row: Row, data: DataSection, labels: LabelsSection, kind: Name) -> LabelColumns:
    if kind == "reward":
        return LabelColumns(*ANSWERS, None)
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
    if kind == "reward":
        margin = row.columns.get("margin")
        if margin is not None and type(margin) not in (int, float):
            actual = f'column "margin" holds {short(repr(margin))}'
            raise DataError(Problem(row.place, actual, "a number"))
        better, worse = (_answer(row, name) for name in ANSWERS)
        if type(better) is not type(worse):
            actual = f"{ANSWERS[0]} and {ANSWERS[1]} of two forms"
            raise DataError(Problem(row.place, actual, "two texts, or two lists of messages"))
        return LabelledText(row.place, better, worse, margin or 0.0)
    assert columns.label is not None
    label = _value(row, columns.label)
    if kind == "tokens":
        return LabelledText(row.place, _words(row, columns.text, label), None, label)
    other = None if columns.other is None else _text(row, columns.other)
    return LabelledText(row.place, _text(row, columns.text), other, label)


def _answer(row: Row, column: str) -> str | Chat:
    """Return an answer with its prompt, which may be in a column of its own."""
    value = _value(row, column)
    prompt = row.columns.get("prompt")
    if isinstance(value, str):
        text = _text(row, column)
        if prompt is None:
            return text
        if not isinstance(prompt, str):
            actual = f'column "prompt" holds {short(repr(prompt))}, beside answers that are texts'
            raise DataError(Problem(row.place, actual, "text"))
        return prompt + text
    before = [] if prompt is None else messages_of(row, "prompt", prompt)
    messages = [*before, *messages_of(row, column, value)]
    check_turns(row.place, messages)
    return Chat(messages, tools_of(row), 0, row.place)


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


def _value(row: Row, column: str) -> Any:
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
