"""The messages of a chat, from the forms in which data sets have them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from trainer.data.sources.formats import Row, short
from trainer.errors import DataError, Problem
from trainer.storage import Json, parse_json

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


class Chat(NamedTuple):
    """Messages as chat templates take them: `role`, `content`, and other keys of the data."""

    messages: list[Json]
    tools: list[Json] | None = None
    learned_from: int = 0
    """The index of the first message that may count in the loss: those of a prompt do not."""
    place: str = ""


def messages_of(row: Row, column: str, value: object) -> list[Json]:
    place = f"{row.place}: {column}"
    value = _parsed(value)
    if not isinstance(value, list):
        raise DataError(Problem(place, short(repr(value)), "a list of messages"))
    if not value:
        raise DataError(Problem(place, "an empty chat", "at least one message"))
    return [_message(f"{place}[{turn}]", message) for turn, message in enumerate(value)]


def _message(place: str, given: object) -> Json:
    if not isinstance(given, Mapping):
        raise DataError(Problem(place, short(repr(given)), 'a message with "role" and "content"'))
    message = {key: value for key, value in given.items() if value is not None}
    role = message.pop("from", None) if "role" not in message else message.pop("role")
    if not isinstance(role, str) or not role:
        keys = f"the keys {', '.join(map(str, given))}"
        actual = keys if role is None else f"the role {short(repr(role))}"
        raise DataError(Problem(place, actual, '"role" (or "from") with a name'))
    content = message.pop("value", None) if "content" not in message else message.pop("content")
    if content is None and "tool_calls" in message:
        content = ""
    counts = _counts(place, message)
    if "tool_calls" in message:
        message["tool_calls"] = _calls(place, _parsed(message["tool_calls"]))
    own = {"role": _ROLES.get(role, role), "content": _content(place, content)}
    return {**own, **message, **counts}


def _content(place: str, content: object) -> str:
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                expected = "text: images and sounds are not trained on"
                raise DataError(Problem(place, f"a part of type {kind}", expected))
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        other = f"{type(content).__name__} {short(repr(content))}"
        raise DataError(Problem(place, "no content" if content is None else other, "text"))
    return checked_text(place, content)


def _counts(place: str, message: Json) -> dict[str, bool]:
    """Return a turn's own mark that it counts in the loss: OpenAI's `weight`, Axolotl's `train`."""
    for key, values in (("weight", {0: False, 1: True}), ("train", {False: False, True: True})):
        if key in message:
            value = message.pop(key)
            if isinstance(value, list | dict) or value not in values:
                raise DataError(Problem(place, f"{key} {short(repr(value))}", "0 or 1"))
            return {"counts": values[value]}
    return {}


def _calls(place: str, calls: object) -> list[Json]:
    """Return tool calls with arguments as objects, which OpenAI's data has as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(Problem(f"{place}.tool_calls", short(repr(calls)), "a list of calls"))
    result = []
    for call in calls:
        kept = {key: value for key, value in call.items() if value is not None}
        if isinstance(function := call.get("function"), Mapping):
            arguments = _parsed(function.get("arguments"))
            kept["function"] = {**function, "arguments": {} if arguments is None else arguments}
        result.append(kept)
    return result


def tools_of(row: Row) -> list[Json] | None:
    if not (tools := _parsed(row.columns.get("tools"))):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        place = f"{row.place}: tools"
        raise DataError(Problem(place, short(repr(tools)), "a list of JSON schemas"))
    return tools


def check_turns(place: str, messages: list[Json]) -> None:
    for turn, (one, other) in enumerate(pairwise(messages), 1):
        if one["role"] == other["role"] == "assistant":
            actual = f"the turns {turn - 1} and {turn} are both the assistant's"
            raise DataError(
                Problem(place, actual, "one answer to each turn of another", "Join them")
            )


def _parsed(value: object) -> Any:
    """Parse JSON text, as tables hold it; return anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return parse_json(value)
    return value


def checked_text(place: str, value: str, holds: str = "") -> str:
    """Return the text; raises DataError if it is not valid Unicode."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            actual = f"{holds}half of a surrogate pair at character {error.start}"
            raise DataError(Problem(place, actual, "valid Unicode")) from error
    return value
