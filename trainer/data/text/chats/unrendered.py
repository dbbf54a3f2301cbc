"""A search for contents of a chat that no character of its rendering shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.data.sources.formats import short
from trainer.data.text.chats.turns import Chat
from trainer.errors import DataError, Problem
from trainer.storage import Json

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys of an answer's reasoning in the templates of different families."""
PAST = "reasoning before the last question"
_READ = {"role", "content", "tool_calls", "counts", *REASONING}
_OTHER = " (another text)"
"""An addition to a value, to see if the rendering changes with it."""

Span = tuple[int, int]
Renders = Callable[[Chat], str | None]
"""Renders a chat; returns None if the template rejects it."""


def unrendered(chat: Chat, text: str, renders: Renders) -> dict[str, int]:
    """Count the messages whose reasoning or other keys `text`, the rendered chat, does not show.

    The chat's tools count as one. Where a value is not found as it is, the chat is rendered with
    another value: a template that makes the same text of both does not show it. Raises DataError
    for a content or a tool call that is not shown.
    """
    return _Comparison(chat, text, renders).counts()


@dataclass(frozen=True)
class _Comparison:
    chat: Chat
    text: str
    renders: Renders

    def counts(self) -> dict[str, int]:
        places = self._places()
        if places is None:
            self._check_contents()
        self._check_calls(places)
        counts = Counter(self._unseen_reasoning(places))
        counts.update(self._unseen_keys())
        tools = self.chat.tools
        if tools and not all(_has(self.text, _name(tool)) for tool in tools):
            counts["tools"] += self._same(self.chat._replace(tools=None))
        return {key: count for key, count in counts.items() if count}

    def _places(self) -> list[Span] | None:
        """Find each content after the one before; None if one is not found so."""
        places = []
        at = 0
        for message in self.chat.messages:
            starts = [(self.text.find(form, at), form) for form in _forms(_words(message))]
            start, form = min(((s, f) for s, f in starts if s >= 0), default=(-1, ""))
            if start < 0:
                return None
            at = start + len(form)
            places.append((start, at))
        return places

    def _check_contents(self) -> None:
        for turn, message in enumerate(self.chat.messages):
            other = {"content": message["content"] + _OTHER}
            if not _words(message) or not self._same(self._with(turn, other)):
                continue
            if message.get("tool_calls"):
                self._lost(turn, "content beside tool calls")
            else:
                turned = f'turn {turn} of the role "{message["role"]}"'
                actual = f"{turned} is not in what the chat template renders"
                raise DataError(Problem(self.chat.place, actual, "roles that the template knows"))

    def _check_calls(self, places: list[Span] | None) -> None:
        for turn, message in enumerate(self.chat.messages):
            calls = message.get("tool_calls") or []
            around = self._around(turn, places)
            for number, call in enumerate(calls):
                leaves = [_name(call), *_leaves(_function(call).get("arguments"))]
                if all(_has(around, leaf) for leaf in leaves) and len(calls) == 1:
                    continue
                before = calls[:number]
                after = calls[number + 1 :]
                changed = [[*before, *after] or None]
                if len(leaves) > 1:
                    changed.append([*before, _bare(call), *after])
                if any(self._same(self._with(turn, {"tool_calls": one})) for one in changed):
                    self._lost(turn, f"tool call {number} ({short(_name(call))})")

    def _lost(self, turn: int, what: str) -> None:
        actual = f"turn {turn}: its {what} is not in what the chat template renders"
        hint = "Set trainer.data.chat_template to one that renders it, or take it out of the data"
        raise DataError(Problem(self.chat.place, actual, "a template that renders it", hint))

    def _unseen_reasoning(self, places: list[Span] | None) -> Iterator[str]:
        roles = [message["role"] for message in self.chat.messages]
        last = max((turn for turn, role in enumerate(roles) if role == "user"), default=-1)
        for turn, message in enumerate(self.chat.messages):
            around = self._around(turn, places)
            for key in REASONING:
                value = message.get(key)
                if not value or _has(around, str(value).strip()):
                    continue
                if self._same(self._with(turn, {key: f"{value}{_OTHER}"})):
                    yield PAST if turn < last else key
            thought = _thought(message)
            if message["role"] != "assistant" or not thought or _has(around, thought):
                continue
            head, end, tail = message["content"].partition("</think>")
            if self._same(self._with(turn, {"content": f"{head}{_OTHER}{end}{tail}"})):
                if turn > last:
                    self._lost(turn, "reasoning, before </think>,")
                yield PAST

    def _unseen_keys(self) -> Iterator[str]:
        """Yield each further key of a message that is not shown, for each message that has it."""
        messages = self.chat.messages
        keys = [key for one in messages for key, value in one.items() if _is_further(key, value)]
        names = list(dict.fromkeys(keys))
        if not names or self._same(self._without(names)):
            yield from keys
            return
        unseen = [name for name in names if len(names) > 1 and self._same(self._without([name]))]
        yield from (key for key in keys if key in unseen)

    def _around(self, turn: int, places: list[Span] | None) -> str:
        """Return the text around a turn's content, up to the next; all if unknown."""
        if places is None:
            return self.text
        begin = places[turn - 1][1] if turn else 0
        end = places[turn + 1][0] if turn + 1 < len(places) else len(self.text)
        return f"{self.text[begin : places[turn][0]]}\n{self.text[places[turn][1] : end]}"

    def _same(self, other: Chat) -> bool:
        return self.renders(other) == self.text

    def _with(self, turn: int, values: Json) -> Chat:
        messages = list(self.chat.messages)
        changed = {**messages[turn], **values}
        messages[turn] = {key: value for key, value in changed.items() if value is not None}
        return self.chat._replace(messages=messages)

    def _without(self, keys: Sequence[str]) -> Chat:
        messages = self.chat.messages
        kept = [{key: one[key] for key in one if key not in keys} for one in messages]
        return self.chat._replace(messages=kept)


def _is_further(key: str, value: object) -> bool:
    return key not in _READ and value not in (None, "", [], {})


def _words(message: Json) -> str:
    """Return a content without the reasoning before it, and without space at its ends."""
    content: str = message["content"]
    if message["role"] == "assistant":
        content = content.rpartition("</think>")[2]
    return content.strip()


def _thought(message: Json) -> str:
    return str(message["content"]).rpartition("</think>")[0].rpartition("<think>")[2].strip()


def _forms(words: str) -> tuple[str, ...]:
    return words, json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)[1:-1]


def _has(text: str, value: str) -> bool:
    return any(form in text for form in _forms(value))


def _function(call: object) -> Json:
    function = call.get("function", call) if isinstance(call, dict) else {}
    return function if isinstance(function, dict) else {}


def _name(call: object) -> str:
    return str(_function(call).get("name", ""))


def _bare(call: Json) -> Json:
    """Return the call without its arguments."""
    if "function" in call:
        return {**call, "function": {**_function(call), "arguments": {}}}
    return {**call, "arguments": {}}


def _leaves(value: object) -> Iterator[str]:
    """Yield the texts and numbers in the arguments of a call."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value.strip()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
