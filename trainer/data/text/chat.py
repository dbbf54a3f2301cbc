"""Renders chats by a chat template, tokenises them, and marks their label tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.formats import short
from trainer.data.text.records import Chat, checked_text
from trainer.data.text.token_files import Encoded
from trainer.data.text.tokenizer import tokens_of
from trainer.errors import ConfigError, DataError, Problem, first_line, refused
from trainer.models.door import LONGEST, MEMORY, SECONDS, TIMES, bounded

PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<|assistant|>\n{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}"
    "<|{{ message.role }}|>\n{{ message.content }}\n"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The template for a tokenizer without one: roles before turns, end-of-text after answers."""

Span = tuple[int, int]
"""A range of characters in the rendered chat: the first, and one past the last."""


@dataclass(frozen=True)
class Template:
    """A chat template, run in transformers' sandbox."""

    tokenizer: Any
    text: str | None
    """The template itself; None: the tokenizer's own, which may be several."""
    origin: str
    """Where the template is from, for the user."""
    loss_on: str = "assistant"
    """The part of a chat that counts in the loss: trainer.data.loss_on."""

    @classmethod
    def of(cls, tokenizer: Any, path: str | None, loss_on: str = "assistant") -> Template:
        """Return the file's template, the tokenizer's own, or the plain one. Raises ConfigError."""
        if path is None and tokenizer.chat_template:
            return cls(tokenizer, None, "the tokenizer's own template", loss_on)
        if path is None:
            return cls(tokenizer, PLAIN, "a plain template, as the tokenizer has none", loss_on)
        place = f"trainer.data.chat_template: {path}"
        with refused(place, "a file with a Jinja template", OSError, UnicodeDecodeError):
            text = Path(path).expanduser().read_text(encoding="utf-8")
        _compiled(text, place)
        return cls(tokenizer, text, f"the template of {path}", loss_on)

    @property
    def key(self) -> list[Any]:
        """A value that two templates share only if they render and mask chats alike."""
        return [self.text or self.tokenizer.chat_template, self.loss_on]

    def encode(self, chats: Sequence[Chat]) -> Iterator[Encoded]:
        """Tokenise chats; the assistant's turns, with the end of each, are label tokens.

        Raises DataError for a chat that the template refuses, omits part of, or renders differently
        once more turns follow.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            kind = type(self.tokenizer).__name__
            seen = f"{kind}, which does not say which characters a token stands for"
            raise DataError(Problem("trainer.data.tokenizer", seen, "a fast tokenizer, for chats"))
        rendered = [self.render(chat) for chat in chats]
        found = tokens_of(self.tokenizer, [text for text, _ in rendered], offsets=True)
        tokens = zip(found["input_ids"], found["offset_mapping"], strict=True)
        for chat, (_, spans), (ids, offsets) in zip(chats, rendered, tokens, strict=True):
            characters = np.array(offsets, np.int64).reshape(-1, 2)
            yield Encoded(ids, _overlapping(characters, spans), chat.place)

    def render(self, chat: Chat) -> tuple[str, list[Span]]:
        """Render a chat, and find the spans that count in the loss. Raises DataError."""
        marked = "endgeneration" in self._template(chat)
        text, generated = self._rendered(chat, len(chat.messages), marks=marked)
        checked_text(chat.place, text, "the rendered chat holds ")
        _check_complete(chat, text)
        if self.loss_on == "all" and not chat.learned_from:
            return text, [(0, len(text))]
        roles = [message["role"] for message in chat.messages]
        answers = [turn for turn, role in enumerate(roles) if role == "assistant"]
        learned = self._learned(chat, answers)
        if marked:
            if len(generated) != len(answers):
                blocks = f"{len(generated)} blocks of {{% generation %}}"
                seen = f"{blocks} for {len(answers)} of the assistant's turns"
                raise DataError(Problem(chat.place, seen, "one for each", "Mend the chat template"))
            of_turn = dict(zip(answers, generated, strict=True))
            spans = {turn: self._with_end(of_turn[turn], text) for turn in learned}
        else:
            spans = {turn: self._span(chat, turn, text) for turn in learned}
        last = len(roles) - 1
        if last in spans:
            start, end = spans[last]
            if not self._ends_turn(text[start:end]):  # the model has to learn where to stop
                text = text[:end] + self.tokenizer.eos_token
                spans[last] = start, len(text)
        return text, list(spans.values())

    def _learned(self, chat: Chat, answers: list[int]) -> list[int]:
        turns = answers[-1:] if self.loss_on == "last_assistant" else answers
        turns = [turn for turn in turns if turn >= chat.learned_from]
        return [turn for turn in turns if chat.messages[turn].get("counts", True)]

    def _span(self, chat: Chat, turn: int, text: str) -> Span:
        """Find what an answer adds: from its prompt at the end of the chat before, to its end."""
        before, _ = self._rendered(chat, turn, prompts=True)
        after, _ = self._rendered(chat, turn + 1)
        after = self._without_tail(after, len(before))
        if not after.startswith(before):
            self._rewrites(chat, turn, before, after, "once it is answered")
        if not text.startswith(after):
            self._rewrites(chat, turn, after, text, "once more turns follow")
        return len(before), len(after)

    def _without_tail(self, text: str, start: int) -> str:
        """Cut off the text after the token that ends the turn, which templates add at the very end.

        Text before `start` ends no turn: for an empty answer, it is the header of the turn.
        """
        bare = text.rstrip()
        inner = bare.removesuffix(self.tokenizer.eos_token).rstrip()
        for part in (inner, bare):
            if len(part) > start and self._ends_turn(part):
                return part
        return text

    def _ends_turn(self, text: str) -> bool:
        return text.endswith(self._special)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        tokens = self.tokenizer.added_tokens_decoder.values()
        return tuple(str(token) for token in tokens if token.special)

    def _with_end(self, span: Span, text: str) -> Span:
        """Extend a marked span by the token that ends the turn, if the mark leaves it out."""
        start, end = span
        if self._ends_turn(text[start:end].rstrip()):
            return span
        following = [len(token) for token in self._special if text.startswith(token, end)]
        return start, end + max(following, default=0)

    def _rewrites(self, chat: Chat, turn: int, one: str, other: str, when: str) -> None:
        at = len(commonprefix([one, other]))
        before, after = (short(repr(text[at : at + 24])) for text in (one, other))
        seen = f"the template rewrites turn {turn} {when}: {before} becomes {after}"
        expected = "a template that keeps what it has written"
        other = 'set trainer.data.loss_on to "last_assistant"'
        mend = f"Mark answers in it with {{% generation %}}, or {other}"
        raise DataError(Problem(chat.place, seen, expected, mend))

    def _template(self, chat: Chat) -> str:
        return str(self.tokenizer.get_chat_template(self.text, tools=chat.tools))

    def _rendered(
        self, chat: Chat, turns: int, prompts: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        kept = chat.messages[:turns]
        messages = [{k: v for k, v in message.items() if k != "counts"} for message in kept]
        room = LONGEST + TIMES * (len(str(messages)) + len(str(chat.tools)))
        try:
            with bounded(MEMORY + TIMES * room, SECONDS):
                texts, spans = render_jinja_template(  # type: ignore[misc]
                    conversations=[messages],  # type: ignore[list-item]
                    tools=chat.tools,  # type: ignore[arg-type]
                    chat_template=self._template(chat),
                    add_generation_prompt=prompts,
                    return_assistant_tokens_mask=marks,
                    **self.tokenizer.special_tokens_map,
                )
            if len(texts[0]) > room:
                raise MemoryError
        except (MemoryError, TimeoutError) as error:
            limits = f"more than {room:,} characters of it, or takes too much memory or time"
            seen, expected = f"{self.origin} makes {limits}", "a template that ends soon"
            raise DataError(Problem(chat.place, seen, expected, "Mend the template")) from error
        except Exception as error:  # a template raises whatever it likes
            roles = ", ".join(message["role"] for message in messages[:12])
            seen = f"the chat template refuses it: {first_line(error)} (roles: {roles})"
            raise DataError(Problem(chat.place, seen, "a chat that the template takes")) from error
        return texts[0], [(first, last) for first, last in spans[0]] if marks else []


def _compiled(template: str, place: str) -> None:
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        # too much memory or time is reported with the first chat
        with suppress(MemoryError, TimeoutError), bounded(MEMORY, SECONDS):
            _compile_jinja_template(template)
    except jinja2.TemplateSyntaxError as error:
        problem = Problem(f"{place}:{error.lineno}", str(error.message), "a Jinja template")
        raise ConfigError(problem) from error


def _check_complete(chat: Chat, text: str) -> None:
    """Raise DataError for a turn that the template leaves out because it does not know the role."""
    for turn, message in enumerate(chat.messages):
        # past reasoning that a reasoning model's template drops is not required
        words = message["content"].rpartition("</think>")[2].strip()
        forms = words, json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)
        if not any(form in text for form in forms):
            turned = f'turn {turn} of the role "{message["role"]}"'
            seen = f"{turned} is not in what the chat template renders"
            raise DataError(Problem(chat.place, seen, "roles that the template knows"))


def _overlapping(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Mark the tokens, by their characters [tokens, 2], that overlap a span: bool [tokens]."""
    found = np.zeros(len(offsets), np.bool_)
    for first, last in spans:
        found |= (offsets[:, 1] > first) & (offsets[:, 0] < last) & (offsets[:, 1] > offsets[:, 0])
    return found
