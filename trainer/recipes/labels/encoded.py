"""Labelled texts as tokens, cut or left out where they are too long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from transformers import BatchEncoding

from trainer.data.text.chats.chat import Template
from trainer.data.text.chats.turns import Chat
from trainer.data.text.tokenizer import tokenizer_key
from trainer.errors import DataError, Problem, refused
from trainer.recipes.labels.kinds import Name
from trainer.recipes.labels.rows import LabelledText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_WORD = -1
"""The word of a token that begins none: a special token, or the rest of a word."""


class EncodedText(NamedTuple):
    rows: list[list[int]]
    """The tokens of its sequences: one, or two of a pair of answers."""
    types: list[int]
    """The number of the text of each token, 0 or 1, if a sequence has two; else empty."""
    words: list[int]
    """The word that each token begins, of labelled words, or NO_WORD."""
    truncated: bool


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, with the special tokens that it adds, and the length of a sequence."""

    tokenizer: PreTrainedTokenizerBase
    template: Template
    longest: int
    too_long: str

    @property
    def key(self) -> list[object]:
        """A value that two encoders share only if they make the same tokens of every text."""
        special = self.tokenizer("")["input_ids"]
        return [
            tokenizer_key(self.tokenizer),
            special,
            self.template.key,
            self.longest,
            self.too_long,
        ]

    def encode(self, kind: Name, texts: Sequence[LabelledText]) -> Iterator[EncodedText | None]:
        """Yield the tokens of each text; None for one that is left out. Raises DataError."""
        place = "trainer.data.tokenizer"
        with refused(place, "a tokenizer that takes every text", named=True, raises=DataError):
            if kind == "reward":
                made = self._pairs(texts)
            elif kind == "tokens":
                made = self._words(texts)
            else:
                made = self._sequences(texts)
        for text, encoded in zip(texts, made, strict=True):
            yield self._fitting(text.place, encoded)

    def _fitting(self, place: str, encoded: EncodedText) -> EncodedText | None:
        longest = max(map(len, encoded.rows))
        if longest <= self.longest and not encoded.truncated:
            return encoded
        if self.too_long == "drop":
            return None
        if self.too_long == "error":
            expected = f"at most {self.longest} (trainer.data.sequence_length)"
            raise DataError(Problem(place, "more tokens than a sequence has", expected))
        rows = [row[: self.longest] for row in encoded.rows]
        return encoded._replace(rows=rows, words=encoded.words[: self.longest], truncated=True)

    def _sequences(self, texts: Sequence[LabelledText]) -> list[EncodedText]:
        """Tokenise texts, or pairs; the tokenizer cuts them, and keeps its special tokens."""
        pairs = [text.other for text in texts] if texts[0].other is not None else None
        given = ([text.text for text in texts], *([pairs] if pairs else []))
        cut = self._tokenised(*given, truncation=True, max_length=self.longest)
        whole = self._tokenised(*given)
        types = cut.get("token_type_ids") if pairs else None
        return [
            EncodedText([ids], types[row] if types else [], [], len(full) > len(ids))
            for row, (ids, full) in enumerate(
                zip(cut["input_ids"], whole["input_ids"], strict=True)
            )
        ]

    def _words(self, texts: Sequence[LabelledText]) -> list[EncodedText]:
        """Tokenise words; the first token of each has its label."""
        options: dict[str, object] = {"is_split_into_words": True}
        whole = self._tokenised([text.text for text in texts], **options)
        options |= {"truncation": True, "max_length": self.longest}
        cut = self._tokenised([text.text for text in texts], **options)
        made = []
        for row, ids in enumerate(cut["input_ids"]):
            words = cut.word_ids(row)
            before = [None, *words[:-1]]
            begins = [
                NO_WORD if word is None or word == last else word
                for word, last in zip(words, before, strict=True)
            ]
            made.append(EncodedText([ids], [], begins, len(whole["input_ids"][row]) > len(ids)))
        return made

    def _pairs(self, texts: Sequence[LabelledText]) -> list[EncodedText]:
        """Tokenise answers with their prompts; a text ends with the end-of-text token."""
        answers = [side for text in texts for side in (text.text, text.other)]
        chats = [one for one in answers if isinstance(one, Chat)]
        plain = [one for one in answers if isinstance(one, str)]
        if chats and plain:
            place = texts[0].place
            raise DataError(Problem(place, "texts and chats", "answers of one form in all rows"))
        if chats:
            rows = [list(one.tokens) for one in self.template.encode(chats)]
        else:
            end = str(self.tokenizer.eos_token or "")
            ended = [one if one.endswith(end) else one + end for one in plain]
            rows = self._tokenised(ended)["input_ids"]
        return [EncodedText(rows[at : at + 2], [], [], False) for at in range(0, len(rows), 2)]

    def _tokenised(self, *texts: object, **options: object) -> BatchEncoding:
        return self.tokenizer(*texts, verbose=False, return_attention_mask=False, **options)
