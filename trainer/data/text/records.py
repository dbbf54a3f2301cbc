"""Rows to documents: texts, prompts with completions, instructions, chats. The rows themselves
decide which.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from trainer.data.formats import Location, Row, rows_of, short
from trainer.data.text import corpus
from trainer.errors import DataError, Problem
from trainer.storage import parse_json


class Text(NamedTuple):
    """A text to train on; if it has a prompt, only `text` counts in the loss."""

    text: str
    prompt: str | None = None
    place: str = ""


class Chat(NamedTuple):
    """Messages as chat templates take them: `role`, `content`, and other keys of the data."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    learned_from: int = 0
    """The index of the first message that may count in the loss: those of a prompt do not."""
    place: str = ""


Document = Text | Chat | DataError
"""A document, or the error of a row that is skipped."""


@dataclass
class Found:
    """The kind of rows that was found, for the user."""

    kind: str = ""
    where: str = ""
    """The place of the first row."""
    roles: dict[str, None] = field(default_factory=dict)
    turns: int = 0
    empty: int = 0
    """The number of rows with nothing to train on."""
    unread: dict[str, None] = field(default_factory=dict)
    """Keys of messages that nothing here reads."""
    share: float | None = None
    """The share of the input that has been read, if known."""

    def describe(self) -> str:
        if not self.roles:
            return self.kind
        unread = f"; templates alone may read {', '.join(self.unread)}" if self.unread else ""
        return (
            f"{self.kind}, {len(self.roles)} roles ({', '.join(self.roles)}), {self.turns} "
            f"turns at most{unread}"
        )


@dataclass(frozen=True)
class Kind:
    """A way to read rows that have these columns."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], Document | None]
    """Returns the document, or None if there is nothing to train on."""
    also: tuple[str, ...] = ()
    """Columns that it reads if they are present."""

    def fits(self, row: Row) -> bool:
        return all(row.columns.get(column) is not None for column in self.columns)


def read_documents(
    location: Location, options: Any, found: Found | None = None
) -> Iterator[Document | None]:
    """Yield the documents in order, or None for a row with nothing to train on; `found` is filled
    in.

    A row that can't be read, lacks a column, is of another kind than the first, or is no chat,
    raises DataError, or is yielded as that error if corrupt rows are skipped
    (`trainer.data.corrupt`).
    """
    found = found or Found()
    if not location.hub and not location.files:
        found.kind = "text"
        yield from map(Text, corpus.documents())
        return
    kinds = _kinds(options)
    columns = list(dict.fromkeys(name for kind in kinds for name in (*kind.columns, *kind.also)))
    chosen: Kind | None = kinds[0] if len(kinds) == 1 else None
    for row in islice(
        rows_of(location, options, columns, partial(setattr, found, "share")), options.max_rows
    ):
        try:
            if row.error is not None:
                raise row.error
            if chosen is None or (len(kinds) > 1 and not chosen.fits(row)):
                chosen = _kind_of(row, kinds, chosen, found)
            document = None if chosen is None else chosen.read(row)
        except DataError as error:
            if options.corrupt == "error":
                raise
            yield error
            continue
        found.empty += document is None
        if chosen is None:
            yield None
            continue
        found.where = found.where or row.place
        found.kind = found.kind or chosen.name
        if isinstance(document, Chat):
            _note(found, document)
        yield document


def _kinds(options: Any) -> list[Kind]:
    """List the kinds that rows may be of; one alone if the config names it."""
    prompt, completion = (
        options.prompt_column or "prompt",
        options.completion_column or "completion",
    )
    kinds = {
        "text": Kind("text", (options.text_column,), lambda row: _plain(row, options.text_column)),
        "prompt_completion": Kind(
            "prompts and completions",
            (prompt, completion),
            lambda row: _prompted(row, prompt, completion),
            ("tools",),
        ),
        "instruction": Kind(
            "instructions", ("instruction", "output"), _instruction, ("input", "system", "history")
        ),
        "chat": Kind(
            "chats",
            (options.chat_column,),
            lambda row: _chat(row, options.chat_column),
            ("tools", "system"),
        ),
    }
    wanted = options.records
    if wanted == "alpaca":
        return [Kind("Alpaca's prompts", ("instruction", "output"), _alpaca, ("input",))]
    if wanted == "auto" and options.prompt_column is not None:
        wanted = "prompt_completion"
    elif wanted == "auto" and options.text_column != "text":
        wanted = "text"
    if wanted == "auto" and options.chat_column == "messages":
        shared = Kind(
            "chats",
            ("conversations",),
            lambda row: _chat(row, "conversations"),
            ("tools", "system"),
        )
        return [*kinds.values(), shared]
    return [kinds["chat" if wanted == "auto" else wanted]]


def _kind_of(row: Row, kinds: Sequence[Kind], chosen: Kind | None, found: Found) -> Kind | None:
    """Choose the kind of a row. Raises DataError if several kinds fit, none, or another than
    before.
    """
    fitting = [kind for kind in kinds if kind.fits(row)]
    names = [f"{kind.name} ({', '.join(kind.columns)})" for kind in fitting]
    if len(fitting) > 1:
        raise DataError(
            Problem(row.place, f"{' and '.join(names)}", "one of them", "Set trainer.data.records")
        )
    if chosen is not None and fitting:
        seen = f"{names[0]}, where {found.where} has {chosen.name} ({', '.join(chosen.columns)})"
        raise DataError(
            Problem(row.place, seen, "rows of one kind", "Give them as two trainer.data.sources")
        )
    if fitting:
        return fitting[0]
    text = next(kind for kind in kinds if kind.name == "text")
    known = chosen or next(
        (kind for kind in kinds if all(name in row.columns for name in kind.columns)), text
    )
    known.read(row)  # raises for a missing column
    return chosen


def _note(found: Found, chat: Chat) -> None:
    found.turns = max(found.turns, len(chat.messages))
    for message in chat.messages:
        found.roles.setdefault(message["role"])
        for key in message.keys() - _READ:
            found.unread.setdefault(key)


# The kinds


def _plain(row: Row, column: str) -> Text | None:
    text = _text(row, column)
    return Text(text, None, row.place) if text and text.strip() else None


def _prompted(row: Row, prompt: str, completion: str) -> Document | None:
    given, wanted = row.columns.get(prompt), row.columns.get(completion)
    if isinstance(given, list) or isinstance(wanted, list):
        before = _messages(row, prompt, given)
        messages = [*before, *_messages(row, completion, wanted)]
        _check_turns(row.place, messages)
        return Chat(messages, _tools(row), len(before), row.place)
    text, start = _text(row, completion), _text(row, prompt)
    return Text(text, start or "", row.place) if text and text.strip() else None


def _instruction(row: Row) -> Chat | None:
    texts = {column: _text(row, column) for column in ("instruction", "output")}
    more = {column: _text(row, column) for column in ("input", "system") if column in row.columns}
    if not (texts["output"] or "").strip():
        return None
    asked = "\n".join(part for part in (texts["instruction"], more.get("input")) if part)
    pairs = [*(row.columns.get("history") or ()), (asked, texts["output"])]
    messages = [{"role": "system", "content": more["system"]}] if more.get("system") else []
    for turn, pair in enumerate(pairs):
        if not (
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(isinstance(text, str) for text in pair)
        ):
            seen = f'column "history", turn {turn}: {short(repr(pair))}'
            raise DataError(Problem(row.place, seen, "a pair of texts"))
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    return Chat(messages, None, 0, row.place)


ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
"""github.com/tatsu-lab/stanford_alpaca, as Axolotl has it: with a line break at the end."""


def _alpaca(row: Row) -> Text | None:
    asked, answer = _text(row, "instruction") or "", _text(row, "output")
    more = _text(row, "input") if "input" in row.columns else None
    paired = (
        (", paired with an input that provides further context", f"### Input:\n{more}\n\n")
        if more
        else ("", "")
    )
    prompt = ALPACA.format(paired[0], asked, paired[1])
    return Text(answer, prompt, row.place) if answer and answer.strip() else None


def _chat(row: Row, column: str) -> Chat:
    if column not in row.columns:
        raise missing(row, column)
    messages = _messages(row, column, row.columns[column])
    if system := row.columns.get("system"):
        if not isinstance(system, str) or messages[0]["role"] == "system":
            raise DataError(
                Problem(row.place, f'column "system": {short(repr(system))}', "one system text")
            )
        messages = [{"role": "system", "content": system}, *messages]
    _check_turns(row.place, messages)
    return Chat(messages, _tools(row), 0, row.place)


# Messages

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_READ = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "counts"})


def _messages(row: Row, column: str, value: Any) -> list[dict[str, Any]]:
    place = f"{row.place}: {column}"
    value = _parsed(value)
    if not isinstance(value, list):
        raise DataError(Problem(place, short(repr(value)), "a list of messages"))
    if not value:
        raise DataError(Problem(place, "an empty chat", "at least one message"))
    return [_message(f"{place}[{turn}]", message) for turn, message in enumerate(value)]


def _message(place: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise DataError(Problem(place, short(repr(given)), 'a message with "role" and "content"'))
    message = {key: value for key, value in given.items() if value is not None}
    role = message.pop("from", None) if "role" not in message else message.pop("role")
    if not isinstance(role, str) or not role:
        seen = (
            f"the keys {', '.join(map(str, given))}"
            if role is None
            else f"the role {short(repr(role))}"
        )
        raise DataError(Problem(place, seen, '"role" (or "from") with a name'))
    content = message.pop("value", None) if "content" not in message else message.pop("content")
    if content is None and "tool_calls" in message:
        content = ""
    counts = _counts(place, message)
    if "tool_calls" in message:
        message["tool_calls"] = _calls(place, _parsed(message["tool_calls"]))
    return {
        "role": _ROLES.get(role, role),
        "content": _content(place, content),
        **message,
        **counts,
    }


def _content(place: str, content: Any) -> str:
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    Problem(
                        place,
                        f"a part of type {kind}",
                        "text: images and sounds are not trained on",
                    )
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        seen = (
            "no content" if content is None else f"{type(content).__name__} {short(repr(content))}"
        )
        raise DataError(Problem(place, seen, "text"))
    return checked_text(place, content)


def _counts(place: str, message: dict[str, Any]) -> dict[str, bool]:
    """Return the data's own mark that a turn counts in the loss or not: OpenAI's `weight`,
    Axolotl's `train`.
    """
    for key, values in (("weight", {0: False, 1: True}), ("train", {False: False, True: True})):
        if key in message:
            value = message.pop(key)
            if isinstance(value, list | dict) or value not in values:
                raise DataError(Problem(place, f"{key} {short(repr(value))}", "0 or 1"))
            return {"counts": values[value]}
    return {}


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects, as templates expect them: OpenAI has them as
    JSON text.
    """
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(Problem(f"{place}.tool_calls", short(repr(calls)), "a list of calls"))
    found = []
    for call in calls:
        kept = {key: value for key, value in call.items() if value is not None}
        if isinstance(function := call.get("function"), Mapping):
            arguments = _parsed(function.get("arguments"))
            kept["function"] = {**function, "arguments": {} if arguments is None else arguments}
        found.append(kept)
    return found


def _tools(row: Row) -> list[dict[str, Any]] | None:
    tools = _parsed(row.columns.get("tools"))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            Problem(f"{row.place}: tools", short(repr(tools)), "a list of JSON schemas")
        )
    return tools


def _check_turns(place: str, messages: list[dict[str, Any]]) -> None:
    for turn, (one, other) in enumerate(zip(messages, messages[1:], strict=False), 1):
        if one["role"] == other["role"] == "assistant":
            seen = f"the turns {turn - 1} and {turn} are both the assistant's"
            raise DataError(Problem(place, seen, "one answer to each turn of another", "Join them"))


def _parsed(value: Any) -> Any:
    """Parse JSON text, as tables hold it; return anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return parse_json(value)
    return value


# Columns


def _text(row: Row, column: str) -> str | None:
    if column not in row.columns:
        raise missing(row, column)
    value = row.columns[column]
    if value is None:
        return None
    if not isinstance(value, str):
        seen = f'column "{column}" holds {type(value).__name__} {short(repr(value))}'
        raise DataError(Problem(row.place, seen, "text"))
    return checked_text(row.place, value, f'column "{column}" holds ')


def checked_text(place: str, value: str, holds: str = "") -> str:
    """Return the text; raises DataError if it is not valid Unicode."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            seen = f"{holds}half of a surrogate pair at character {error.start}"
            raise DataError(Problem(place, seen, "valid Unicode")) from error
    return value


def missing(row: Row, column: str) -> DataError:
    names = [str(name) for name in row.columns]
    close = difflib.get_close_matches(column, names, 1)
    mend = (f'Did you mean "{close[0]}"? ' if close else "") + (
        "Set trainer.data.text_column, chat_column, or prompt_column and completion_column"
    )
    expected = "one of " + ", ".join(f'"{name}"' for name in names)
    return DataError(Problem(row.place, f'no column "{column}"', expected, mend))
