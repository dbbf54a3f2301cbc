"""Rows to documents: texts, prompts with completions, instructions, or chats, by their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from trainer.data.sources.formats import Row, short
from trainer.data.sources.location import Location, rows_of
from trainer.data.text import corpus
from trainer.data.text.chats.turns import Chat, check_turns, checked_text, messages_of, tools_of
from trainer.errors import DataError, Problem, suggestion
from trainer.storage import Json

if TYPE_CHECKING:
    from trainer.config.sections.model_and_data import DataSection


class Text(NamedTuple):
    """A text to train on; if it has a prompt, only `text` counts in the loss."""

    text: str
    prompt: str | None = None
    place: str = ""


class Preference(NamedTuple):
    """Two answers to one prompt, of which one is better."""

    chosen: Text | Chat
    rejected: Text | Chat
    margin: float = 0.0
    """How much better it is, as the data says."""
    place: str = ""


class Ranking(NamedTuple):
    """The pairs of several ranked answers to one prompt; all are held out, or none."""

    pairs: tuple[Preference, ...]
    place: str = ""


Document = Text | Chat | Preference | Ranking | DataError
"""A document, a pair or pairs of them, or the error of a row that is skipped."""


class RowsRead:
    """The kind, roles and turns of the rows that were read, for the user."""

    def __init__(self) -> None:
        self.kind = "text"
        """The kind of the first row, in words; documents without rows are texts."""
        self.first = ""
        """The place of the first row."""
        self.empty = 0
        """The number of rows with nothing to train on."""
        self.share: float | None = None
        """The share of the input that has been read, if known."""
        self.roles: dict[str, None] = {}
        self.turns = 0

    def progress(self, share: float) -> None:
        self.share = share

    def add(self, row: Row, kind: Kind | None, document: Document | None) -> None:
        """Note a row, its kind if that is known by now, and what was made of it."""
        self.empty += document is None
        if kind is not None and not self.first:
            self.first = row.place
            self.kind = kind.name
        pairs = document.pairs if isinstance(document, Ranking) else (document,)
        for chat in (side for pair in pairs for side in _sides(pair)):
            if isinstance(chat, Chat):
                self.turns = max(self.turns, len(chat.messages))
                for message in chat.messages:
                    self.roles.setdefault(message["role"])

    def describe(self) -> str:
        if not self.roles:
            return self.kind
        roles = f"{len(self.roles)} roles ({', '.join(self.roles)})"
        return f"{self.kind}, {roles}, {self.turns} turns at most"


def _sides(document: Document | None) -> tuple[Document | None, ...]:
    return document[:2] if isinstance(document, Preference) else (document,)


@dataclass(frozen=True)
class Kind:
    """A way to read rows that have these columns."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], Document | None]
    """Returns the document, or None if there is nothing to train on."""
    also: tuple[str, ...] = ()
    """Columns that it reads if they are present."""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"

    def fits(self, row: Row) -> bool:
        return all(row.columns.get(column) is not None for column in self.columns)


def read_documents(
    location: Location,
    options: DataSection,
    rows_read: RowsRead | None = None,
    kinds: Sequence[Kind] | None = None,
) -> Iterator[Document | None]:
    """Yield the documents in order, None for a row with nothing to train on; fill in `rows_read`.

    `kinds` are those that rows may be of; None: those of documents.

    A row that can't be read, lacks a column, is of another kind than the first, or is no chat,
    raises DataError, or is yielded as that error if corrupt rows are skipped
    (`trainer.data.corrupt`).
    """
    if not location.hub and not location.files:
        yield from map(Text, corpus.documents())
        return
    rows_read = rows_read or RowsRead()
    kinds = _kinds(options) if kinds is None else kinds
    columns = list(dict.fromkeys(name for kind in kinds for name in (*kind.columns, *kind.also)))
    chosen: Kind | None = kinds[0] if len(kinds) == 1 else None
    for row in islice(rows_of(location, options, columns, rows_read.progress), options.max_rows):
        try:
            if row.error is not None:
                raise row.error
            if chosen is None or (len(kinds) > 1 and not chosen.fits(row)):
                chosen = _kind_of(row, kinds, chosen, rows_read)
            document = None if chosen is None else chosen.read(row)
        except DataError as error:
            if options.corrupt == "error":
                raise
            yield error
            continue
        rows_read.add(row, chosen, document)
        yield document


def _kinds(options: DataSection) -> list[Kind]:
    """List the kinds that rows may be of; one alone if the config names it."""
    pair = options.prompt_column or "prompt", options.completion_column or "completion"
    answered = "instruction", "output"
    kinds = {
        "text": Kind("text", (options.text_column,), partial(_plain, options.text_column)),
        "prompt_completion": Kind(
            "prompts and completions", pair, partial(_prompted, *pair), ("tools",)
        ),
        "instruction": Kind("instructions", answered, _instruction, ("input", "system", "history")),
        "chat": _chats_in(options.chat_column),
    }
    if options.records == "alpaca":
        return [Kind("Alpaca's prompts", answered, _alpaca, ("input",))]
    if options.records != "auto":
        return [kinds[options.records]]
    if options.prompt_column is not None:
        return [kinds["prompt_completion"]]
    if options.text_column != "text":
        return [kinds["text"]]
    if options.chat_column != "messages":
        return [kinds["chat"]]
    return [*kinds.values(), _chats_in("conversations")]


def _chats_in(column: str) -> Kind:
    return Kind("chats", (column,), partial(_chat, column), ("tools", "system"))


def _kind_of(
    row: Row, kinds: Sequence[Kind], chosen: Kind | None, rows_read: RowsRead
) -> Kind | None:
    """Choose the kind of a row. Raises DataError if several fit, none, or another than before."""
    fitting = [kind for kind in kinds if kind.fits(row)]
    if len(fitting) > 1:
        actual = " and ".join(map(str, fitting))
        raise DataError(Problem(row.place, actual, "one of them", "Set trainer.data.records"))
    if chosen is not None and fitting:
        actual = f"{fitting[0]}, where {rows_read.first} has {chosen}"
        hint = "Give them as two trainer.data.sources"
        raise DataError(Problem(row.place, actual, "rows of one kind", hint))
    if fitting:
        return fitting[0]
    text = kinds[0]
    present = (kind for kind in kinds if row.columns.keys() >= set(kind.columns))
    known = chosen or next(present, text)
    known.read(row)  # raises for a missing column
    return chosen


# The kinds


def _plain(column: str, row: Row) -> Text | None:
    return learned(text_of(row, column), None, row)


def _prompted(prompt: str, completion: str, row: Row) -> Document | None:
    given = row.columns.get(prompt)
    wanted = row.columns.get(completion)
    if isinstance(given, list) or isinstance(wanted, list):
        before = messages_of(row, prompt, given)
        messages = [*before, *messages_of(row, completion, wanted)]
        check_turns(row.place, messages)
        return Chat(messages, tools_of(row), len(before), row.place)
    return learned(text_of(row, completion), text_of(row, prompt) or "", row)


def learned(text: str | None, prompt: str | None, row: Row) -> Text | None:
    return Text(text, prompt, row.place) if text and text.strip() else None


def _instruction(row: Row) -> Chat | None:
    instruction = text_of(row, "instruction")
    output = text_of(row, "output")
    more = {column: text_of(row, column) for column in ("input", "system") if column in row.columns}
    if not (output or "").strip():
        return None
    question = "\n".join(part for part in (instruction, more.get("input")) if part)
    before = [{"role": "system", "content": more["system"]}] if more.get("system") else []
    messages: list[Json] = [*before, *history_of(row), {"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": output})
    return Chat(messages, None, 0, row.place)


def history_of(row: Row) -> list[Json]:
    """Return the turns of a column "history", a list of questions with answers; [] without it.

    Raises DataError.
    """
    history = row.columns.get("history") or []
    if not isinstance(history, list | tuple):
        actual = f'column "history" holds {short(repr(history))}'
        raise DataError(Problem(row.place, actual, "a list of pairs of texts"))
    messages: list[Json] = []
    for turn, pair in enumerate(history):
        texts = list(pair) if isinstance(pair, list | tuple) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            actual = f'column "history", turn {turn}: {short(repr(pair))}'
            raise DataError(Problem(row.place, actual, "a pair of texts"))
        for role, text in zip(("user", "assistant"), texts, strict=True):
            messages.append({"role": role, "content": text})
    return messages


ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
"""github.com/tatsu-lab/stanford_alpaca, as Axolotl has it: with a line break at the end."""


def _alpaca(row: Row) -> Text | None:
    instruction = text_of(row, "instruction") or ""
    answer = text_of(row, "output")
    more = text_of(row, "input") if "input" in row.columns else None
    paired = ", paired with an input that provides further context" if more else ""
    given = f"### Input:\n{more}\n\n" if more else ""
    return learned(answer, ALPACA.format(paired, instruction, given), row)


def _chat(column: str, row: Row) -> Chat:
    if column not in row.columns:
        raise missing(row, column)
    messages = messages_of(row, column, row.columns[column])
    if system := row.columns.get("system"):
        if not isinstance(system, str) or messages[0]["role"] == "system":
            actual = f'column "system": {short(repr(system))}'
            raise DataError(Problem(row.place, actual, "one system text"))
        messages = [{"role": "system", "content": system}, *messages]
    check_turns(row.place, messages)
    return Chat(messages, tools_of(row), 0, row.place)


def text_of(row: Row, column: str) -> str | None:
    if column not in row.columns:
        raise missing(row, column)
    if (value := row.columns[column]) is None:
        return None
    if not isinstance(value, str):
        actual = f'column "{column}" holds {type(value).__name__} {short(repr(value))}'
        raise DataError(Problem(row.place, actual, "text"))
    return checked_text(row.place, value, f'column "{column}" holds ')


def missing(row: Row, column: str) -> DataError:
    names = [str(name) for name in row.columns]
    columns = "text_column, chat_column, or prompt_column and completion_column"
    hint = f"{suggestion(column, names)} Set trainer.data.{columns}".lstrip()
    expected = "one of " + ", ".join(f'"{name}"' for name in names)
    return DataError(Problem(row.place, f'no column "{column}"', expected, hint))
