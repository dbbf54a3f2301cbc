"""Documents to tokens, a chunk at a time, in any process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.order import held_out
from trainer.data.text.chats.chat import Template
from trainer.data.text.chats.turns import Chat
from trainer.data.text.cutting import Cut, CutDocuments
from trainer.data.text.fill_in_the_middle import FillInTheMiddle
from trainer.data.text.records import Document, Preference, Ranking, Text
from trainer.data.text.token_files import Encoded, EncodedPair
from trainer.data.text.tokenizer import end_of_text, tokens_of
from trainer.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.config.sections.model_and_data import DataSection

_DOCUMENTS = 1024
_CHARACTERS = 1 << 18
"""The limits of a chunk: it ends with the document that reaches either."""


EncodedDocument = Encoded | EncodedPair | list[EncodedPair] | DataError


class Chunk(NamedTuple):
    """A run of consecutive documents."""

    first: int
    """The number of its first document."""
    documents: list[Document]
    error: DataError | None = None
    """The error raised after its last document; the last chunk may have one."""


class Tokenised(NamedTuple):
    """The tokens of a chunk's documents."""

    documents: int
    train: CutDocuments
    held_out: CutDocuments
    error: DataError | None
    """The error of the first document that is in neither part."""


def chunks(documents: Iterable[Document]) -> Iterator[Chunk]:
    """Split all documents into chunks."""
    some: list[Document] = []
    first = size = 0
    try:
        for number, document in enumerate(documents):
            first = first if some else number
            some.append(document)
            size += _size(document)
            if len(some) == _DOCUMENTS or size >= _CHARACTERS:
                yield Chunk(first, some)
                some = []
                size = 0
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
    if isinstance(document, Ranking):
        return sum(map(_size, document.pairs))
    if isinstance(document, Preference):
        return _size(document.chosen) + _size(document.rejected)
    return sum(len(message["content"]) for message in document.messages)


@dataclass(frozen=True)
class Tokenising:
    """The function that tokenises a chunk, with its settings."""

    template: Template
    cut: Cut
    fraction: float
    """The share of documents that is held out."""
    skips: bool = False
    """True if documents that can't be rendered are left out and counted."""
    fim: FillInTheMiddle | None = None

    @classmethod
    def of(cls, options: DataSection, tokenizer: PreTrainedTokenizerBase) -> Tokenising:
        """Return the function by the options of the data. Raises ConfigError for those of no use
        with the tokenizer.
        """
        cut = Cut(options.sequence_length, options.arrangement, options.isolate, options.too_long)
        counted = options.loss_on, options.generation_prompt
        template = Template.of(tokenizer, options.chat_template, *counted)
        fim = None if options.fim is None else FillInTheMiddle.of(options.fim, tokenizer)
        fraction = options.evaluation_fraction
        return cls(template, cut, fraction, options.corrupt == "skip", fim)

    def __call__(self, chunk: Chunk) -> Tokenised:
        train = CutDocuments()
        evaluated = CutDocuments()
        error = chunk.error
        try:
            every = encode(chunk.documents, self.template, self.skips)
            if self.fim is not None:
                every = self._filled(self.fim, chunk, every)
            for number, encoded in enumerate(every, chunk.first):
                if isinstance(encoded, DataError):
                    train.counts.skip(encoded)
                    continue
                part = evaluated if held_out(number, self.fraction) else train
                if isinstance(encoded, Encoded):
                    part.add(encoded, self.cut)
                    continue
                for pair in [encoded] if isinstance(encoded, EncodedPair) else encoded:
                    part.add_pair(pair, self.cut)
        except DataError as earlier:
            error = earlier
        return Tokenised(len(chunk.documents), train, evaluated, error)

    def _filled(
        self, fim: FillInTheMiddle, chunk: Chunk, every: Iterator[EncodedDocument]
    ) -> Iterator[EncodedDocument]:
        """Yield documents, of which some texts are cut for fill-in-the-middle.

        Held-out texts stay as they are, and those that would be too long then. Raises DataError for
        a document that is no plain text.
        """
        tokenizer = self.template.tokenizer
        longest = self.cut.longest
        for number, document in enumerate(chunk.documents, chunk.first):
            encoded = next(every)
            if isinstance(document, DataError) or held_out(number, self.fraction):
                yield encoded
                continue
            if not isinstance(document, Text) or document.prompt is not None:
                place = getattr(document, "place", "") or "a document"
                actual = "a chat, or a text with a prompt, and trainer.data.fim"
                raise DataError(Problem(place, actual, "plain texts"))
            pieces = fim.pieces(number, document.text)
            if pieces is None:
                yield encoded
                continue
            start = _beginning(tokenizer)
            tokens = [*start, *fim.encode(pieces, tokenizer), end_of_text(tokenizer)]
            cut = Encoded.from_token(tokens, max(1, len(start)), document.place)
            yield encoded if longest is not None and len(tokens) > longest + 1 else cut


def encode(
    documents: Sequence[Document], template: Template, skips: bool = False
) -> Iterator[EncodedDocument]:
    """Encode each document: the tokenizer's beginning, prompt, text, end-of-text; or a chat; or a
    pair of either; or the pairs of a ranking.

    Targets are the text and its end. Prompt and text are tokenised separately, as in inference.
    Raises DataError at the first document that can't be encoded, after all before it; if `skips`,
    yields the error instead.
    """
    for kind, run in groupby(documents, type):
        alike: list[Any] = list(run)
        if kind is DataError:
            yield from alike
        elif kind is Text:
            yield from _texts(alike, template.tokenizer)
        elif kind is Preference:
            yield from _pairs(alike, template, skips)
        elif kind is Ranking:
            for ranking in alike:
                yield _ranking(list(_pairs(ranking.pairs, template, skips)))
        else:
            yield from _chats(alike, template, skips)


def _pairs(
    alike: Sequence[Preference], template: Template, skips: bool
) -> Iterator[EncodedPair | DataError]:
    """Encode both answers of each pair. Raises DataError, or yields it, as `encode` does."""
    answers = encode([one for pair in alike for one in pair[:2]], template, skips)
    for pair in alike:
        chosen = next(answers)
        rejected = next(answers)
        if isinstance(chosen, Encoded) and isinstance(rejected, Encoded):
            yield EncodedPair(chosen, rejected, pair.margin)
        else:
            yield chosen if isinstance(chosen, DataError) else rejected  # type: ignore[misc]


def _ranking(pairs: Sequence[EncodedPair | DataError]) -> list[EncodedPair] | DataError:
    """Return the pairs of a row, or the error of the first that has one."""
    errors = (pair for pair in pairs if isinstance(pair, DataError))
    encoded = [pair for pair in pairs if isinstance(pair, EncodedPair)]
    return next(errors, encoded)


def _chats(alike: Sequence[Chat], template: Template, skips: bool) -> Iterator[Encoded | DataError]:
    for chat in alike:  # one by one: a template may make a long text of each
        try:
            yield from template.encode([chat])
        except DataError as error:
            if not skips:
                raise
            yield error


def _texts(batch: list[Text], tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
    start = _beginning(tokenizer)
    end = [end_of_text(tokenizer)]
    places = [document.place for document in batch]
    texts = tokens_of(tokenizer, [document.text for document in batch])["input_ids"]
    prompts = tokens_of(tokenizer, [document.prompt or "" for document in batch])["input_ids"]
    for place, prompt, text in zip(places, prompts, texts, strict=True):
        tokens = [*start, *prompt, *text, *end]
        yield Encoded.from_token(tokens, max(1, len(start) + len(prompt)), place)


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [bos] if the tokenizer begins texts, and does not end them, with it; else []."""
    bos = tokenizer.bos_token_id
    if bos is None or bos == tokenizer.eos_token_id:
        return []
    return [bos] if tokenizer("")["input_ids"][:1] == [bos] else []
