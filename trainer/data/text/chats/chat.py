"""Renders chats by a chat template, tokenises them, and marks their label tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.sources.formats import short
from trainer.data.text.chats import shipped
from trainer.data.text.chats.generation_prompt import GenerationPrompt, supplied
from trainer.data.text.chats.turns import Chat, checked_text
from trainer.data.text.chats.unrendered import unrendered
from trainer.data.text.token_files import Encoded
from trainer.data.text.tokenizer import tokens_of
from trainer.errors import ConfigError, DataError, Problem, first_line, refused
from trainer.models.door import LONGEST, MEMORY, SECONDS, TIMES, bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

MORE = "once more turns follow"
Span = tuple[int, int]
"""A range of characters in the rendered chat: the first, and one past the last."""


@dataclass(frozen=True)
class Template:
    """A chat template, run in transformers' sandbox."""

    tokenizer: PreTrainedTokenizerBase
    text: str | None
    """The template itself; None: the tokenizer's own, which may be several."""
    origin: str
    """Where the template is from, for the user."""
    loss_on: str = "assistant"
    """The part of a chat that counts in the loss: trainer.data.loss_on."""
    generation_prompt: GenerationPrompt = "mask"
    """The handling of what an answer's prompt has written: trainer.data.generation_prompt."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        path: str | None,
        loss_on: str = "assistant",
        generation_prompt: GenerationPrompt = "mask",
    ) -> Template:
        """Return the template of this name or file, the tokenizer's own, or the plain one.

        Raises ConfigError.
        """
        counted = loss_on, generation_prompt
        if path is None and tokenizer.chat_template:
            return cls(tokenizer, None, "the tokenizer's own template", *counted)
        if path is None:
            return cls(tokenizer, PLAIN, "a plain template, as the tokenizer has none", *counted)
        if path in shipped.NAMES:
            return cls(tokenizer, shipped.read(path), f"the template {path}", *counted)
        place = f"trainer.data.chat_template: {path}"
        shipped.check_name(path, place)
        with refused(place, "a file with a Jinja template", OSError, UnicodeDecodeError):
            text = Path(path).expanduser().read_text(encoding="utf-8")
        _compiled(text, place)
        return cls(tokenizer, text, f"the template of {path}", *counted)

    @property
    def key(self) -> list[object]:
        """A value that two templates share only if they render and mask chats alike."""
        return [self.text or self.tokenizer.chat_template, self.loss_on, self.generation_prompt]

    def encode(self, chats: Sequence[Chat]) -> Iterator[Encoded]:
        """Tokenise chats; the assistant's turns, with the end of each, are label tokens.

        Raises DataError for a chat that the template refuses, omits part of, or renders differently
        once more turns follow.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            kind = type(self.tokenizer).__name__
            actual = f"{kind}, which does not say which characters a token stands for"
            raise DataError(
                Problem("trainer.data.tokenizer", actual, "a fast tokenizer, for chats")
            )
        rendered = [self.render(chat) for chat in chats]
        encoding = tokens_of(self.tokenizer, [text for text, *_ in rendered], offsets=True)
        tokens = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        for chat, (_, spans, unseen), (ids, offsets) in zip(chats, rendered, tokens, strict=True):
            characters = np.array(offsets, np.int64).reshape(-1, 2)
            yield Encoded(ids, _overlapping(characters, spans), chat.place, unseen)

    def render(self, chat: Chat) -> tuple[str, list[Span], dict[str, int]]:
        """Render a chat, find the spans that count in the loss, and count what is not rendered.

        Raises DataError.
        """
        marked = "endgeneration" in self._template(chat)
        text, generated = self._rendered(chat, len(chat.messages), marks=marked)
        checked_text(chat.place, text, "the rendered chat holds ")
        unseen = unrendered(chat, text, self._attempt)
        if self.loss_on == "all" and not chat.learned_from:
            return text, [(0, len(text))], unseen
        roles = [message["role"] for message in chat.messages]
        answers = [turn for turn, role in enumerate(roles) if role == "assistant"]
        learned = self._learned(chat, answers)
        if marked:
            if len(generated) != len(answers):
                blocks = f"{len(generated)} blocks of {{% generation %}}"
                actual = f"{blocks} for {len(answers)} of the assistant's turns"
                raise DataError(
                    Problem(chat.place, actual, "one for each", "Correct the chat template")
                )
            of_turn = dict(zip(answers, generated, strict=True))
            spans = {turn: of_turn[turn] for turn in learned}
        else:
            spans = {turn: self._span(chat, turn, text) for turn in learned}
        spans = {turn: self._with_end(span, text) for turn, span in spans.items()}
        if self.generation_prompt == "mask":
            spans = {turn: self._unprompted(chat, turn, span, text) for turn, span in spans.items()}
        last = len(roles) - 1
        if last in spans:
            start, end = spans[last]
            if not self._is_ended(text[start:end]):  # the model has to learn where to stop
                text = text[:end] + self.tokenizer.eos_token
                spans[last] = start, len(text)
        return text, list(spans.values()), unseen

    def _unprompted(self, chat: Chat, turn: int, span: Span, text: str) -> Span:
        """Leave out of an answer's span what its generation prompt has written."""

        def render(prompts: bool, mode: Mapping[str, object]) -> str | None:
            try:
                return self._rendered(chat, turn, prompts, mode=mode)[0]
            except DataError:
                return None

        start, end = span
        return min(max(start, supplied(self._template(chat), render, text)), end), end

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
            self._rewrites(chat, turn, after, text, MORE)
        return len(before), len(after)

    def _without_tail(self, text: str, start: int) -> str:
        """Cut off the text after the token that ends the turn, which templates add at the very end.

        Text before `start` ends no turn: for an empty answer, it is the header of the turn.
        """
        parts = self._ended(text, start)
        known = [part for part in parts if self._end and part.endswith(self._end)]
        return next(iter(known or parts), text)

    def _ended(self, text: str, start: int) -> list[str]:
        """Return the text up to its last special token; before it, that without end-of-text."""
        bare = text.rstrip()
        inner = bare.removesuffix(self.tokenizer.eos_token).rstrip()
        parts = (inner, bare)
        return [part for part in parts if len(part) > start and part.endswith(self._special)]

    @cached_property
    def _end(self) -> str | None:
        """The token with which the template ends an answer in words; empty if it writes none.

        A token that the next question takes away, as Phi-3's end-of-text, ends the chat. None: not
        known, as the template refuses a plain chat.
        """
        question = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "b"}
        try:
            text, _ = self._rendered(Chat([question, answer]), 2)
            more, _ = self._rendered(Chat([question, answer, question]), 3)
        except DataError:
            return None
        parts = self._ended(text, text.rfind("b") + 1)
        kept = [part for part in parts[::-1] if more.startswith(part)] or parts
        special = [token for part in kept[:1] for token in self._special if part.endswith(token)]
        return max(special, key=len, default="")

    def _is_ended(self, text: str) -> bool:
        """True if an answer's text ends with a token that ends its turn.

        In a template that ends no plain answer itself, a special token at the end of another one
        (a tool call's) is a part of it.
        """
        return self._end != "" and text.rstrip().endswith(self._special)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        tokens = self.tokenizer.added_tokens_decoder.values()
        return tuple(str(token) for token in tokens if token.special)

    def _with_end(self, span: Span, text: str) -> Span:
        """Extend an answer's span by the token that ends the turn, if it leaves that out.

        Where the template writes none, that is the token with which the next turn begins.
        """
        start, end = span
        own = text[start:end].rstrip()
        known = self._end
        rest = text[end:]
        if known and not own.endswith(known) and rest.lstrip().startswith(known):
            return start, end + rest.index(known) + len(known)
        if self._is_ended(own):
            return span
        following = [len(token) for token in self._special if text.startswith(token, end)]
        return start, end + max(following, default=0)

    def _rewrites(self, chat: Chat, turn: int, one: str, other: str, when: str) -> None:
        at = len(commonprefix([one, other]))
        before, after = (short(repr(text[at : at + 24])) for text in (one, other))
        actual = f"the template rewrites turn {turn} {when}: {before} becomes {after}"
        expected = "a template that keeps what it has written"
        ways = ["mark answers in it with {% generation %}"]
        if name := shipped.recognised(self._template(chat), self._special):
            ways.insert(0, f'set trainer.data.chat_template to "{name}"')
        if self.loss_on != "last_assistant" and when == MORE:
            ways.append('set trainer.data.loss_on to "last_assistant"')
        hint = ", or ".join(ways)
        raise DataError(Problem(chat.place, actual, expected, hint[0].upper() + hint[1:]))

    def _attempt(self, chat: Chat) -> str | None:
        """Render another version of a chat; None if the template rejects it."""
        try:
            return self._rendered(chat, len(chat.messages))[0]
        except DataError:
            return None

    def _template(self, chat: Chat) -> str:
        return str(self.tokenizer.get_chat_template(self.text, tools=chat.tools))

    def _rendered(
        self,
        chat: Chat,
        turns: int,
        prompts: bool = False,
        marks: bool = False,
        mode: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[str, list[Span]]:
        """Render the first turns with variables of the template. Raises DataError."""
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
                    **mode,
                )
            if len(texts[0]) > room:
                raise MemoryError
        except (MemoryError, TimeoutError) as error:
            limits = f"more than {room:,} characters of it, or takes too much memory or time"
            actual = f"{self.origin} makes {limits}"
            expected = "a template that ends soon"
            raise DataError(
                Problem(chat.place, actual, expected, "Correct the template")
            ) from error
        except Exception as error:  # a template raises whatever it likes
            roles = ", ".join(message["role"] for message in messages[:12])
            actual = f"the chat template rejects it: {first_line(error)} (roles: {roles})"
            raise DataError(
                Problem(chat.place, actual, "a chat that the template accepts")
            ) from error
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


def _overlapping(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Mark the tokens, by their characters [tokens, 2], that overlap a span: bool [tokens]."""
    overlapping = np.zeros(len(offsets), np.bool_)
    for first, last in spans:
        overlapping |= (
            (offsets[:, 1] > first) & (offsets[:, 0] < last) & (offsets[:, 1] > offsets[:, 0])
        )
    return overlapping
