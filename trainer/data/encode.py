"""Documents to tokens, a chunk of them at a time, in whatever process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from trainer.data.chat import Template
from trainer.data.records import Chat, Document, Text
from trainer.data.source import Cut, CutDocuments, Encoded
from trainer.data.tokenizer import end_of_text, tokens_of
from trainer.errors import DataError

_DOCUMENTS, _CHARACTERS = 1024, 1 << 18
"""Of a chunk: it ends with the document that reaches either."""


class Chunk(NamedTuple):
    """Documents that follow one another."""

    first: int
    """The number of its first document."""
    documents: list[Document]
    error: DataError | None = None
    """What the document after them raised; the last chunk has it."""


class Tokenised(NamedTuple):
    """What became of a chunk."""

    documents: int
    train: CutDocuments
    held: CutDocuments
    error: DataError | None
    """What the first document raised that is in neither."""


def chunks(documents: Iterable[Document]) -> Iterator[Chunk]:
    """All documents, some at a time."""
    some: list[Document] = []
    first = size = 0
    try:
        for number, document in enumerate(documents):
            first = first if some else number
            some.append(document)
            size += _size(document)
            if len(some) == _DOCUMENTS or size >= _CHARACTERS:
                yield Chunk(first, some)
                some, size = [], 0
    except DataError as error:
        yield Chunk(first, some, error)
        return
    if some:
        yield Chunk(first, some)


def _size(document: Document) -> int:
    if isinstance(document, DataError):
        return 0
    if isinstance(document, Text):
        return len(document.text) + len(document.prompt or "")
    return sum(len(message["content"]) for message in document.messages)


@dataclass(frozen=True)
class Tokenising:
    """How chunks are tokenised."""

    template: Template
    cut: Cut
    fraction: float
    """Of the documents, which are held out."""
    skips: bool = False
    """What can't be rendered is left out, and counted."""

    def __call__(self, chunk: Chunk) -> Tokenised:
        train, held, error = CutDocuments(), CutDocuments(), chunk.error
        try:
            for number, encoded in enumerate(encode(chunk.documents, self.template, self.skips), chunk.first):
                if isinstance(encoded, DataError):
                    train.counts.skip(encoded)
                    continue
                part = held if held_out(number, self.fraction) else train
                part.add(encoded, self.cut.longest, self.cut.too_long)
        except DataError as earlier:
            error = earlier
        return Tokenised(len(chunk.documents), train, held, error)


def held_out(index: int, fraction: float) -> bool:
    """Whether document `index` is held out: evenly spaced, `fraction` of all, the second document always.

    So one is held out of as few as two, and which ones depends on no seed.
    """
    return math.floor((index - 1) * fraction) > math.floor((index - 2) * fraction)


def encode(documents: Sequence[Document], template: Template, skips: bool = False) -> Iterator[Encoded | DataError]:
    """Tokens of each document: what the tokenizer begins texts with, prompt, text, end-of-text; or a rendered chat.

    Targets are the text and its end. Prompt and text are tokenised apart, as they are when the model is used.
    Raises DataError at the first document that can't be encoded, after all before it; if it `skips`, gives that error.
    """
    for kind, run in groupby(documents, type):
        alike: list[Any] = list(run)
        if kind is DataError:
            yield from alike
        elif kind is Text:
            yield from _texts(alike, template.tokenizer)
        else:
            yield from _chats(alike, template, skips)


def _chats(alike: Sequence[Chat], template: Template, skips: bool) -> Iterator[Encoded | DataError]:
    try:
        yield from list(template.encode(alike))
        return
    except DataError:  # of one of them: those before it come first
        pass
    for chat in alike:
        try:
            [encoded] = template.encode([chat])
        except DataError as error:
            if not skips:
                raise
            yield error
        else:
            yield encoded


def _texts(batch: list[Text], tokenizer: Any) -> Iterator[Encoded]:
    start, end = _beginning(tokenizer), [end_of_text(tokenizer)]
    places = [document.place for document in batch]
    texts = tokens_of(tokenizer, [document.text for document in batch])["input_ids"]
    prompts = tokens_of(tokenizer, [document.prompt or "" for document in batch])["input_ids"]
    for place, prompt, text in zip(places, prompts, texts, strict=True):
        tokens = [*start, *prompt, *text, *end]
        yield Encoded.from_token(tokens, max(1, len(start) + len(prompt)), place)


def _beginning(tokenizer: Any) -> list[int]:
    """[bos] if the tokenizer itself begins a text so, and it is not the token that ends one; else []."""
    bos = tokenizer.bos_token_id
    begins = bos is not None and bos != tokenizer.eos_token_id and tokenizer("")["input_ids"][:1] == [bos]
    return [bos] if begins else []
