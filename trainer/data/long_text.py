"""Texts to tokens, long ones a piece at a time: a tokenizer takes some 160 bytes of memory for each character."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import DataError, Problem

_PIECE, _MOST = 1 << 20, 1 << 22
"""Characters of a piece, and of one at most where a text can't be cut sooner."""
_AROUND = 2048
"""Characters on either side of a cut that are tokenised with it and without it."""
_TRIED = 64
"""Places of each kind that are tried in a piece."""


class Tokens(NamedTuple):
    """Of a text."""

    ids: Sequence[int] | np.ndarray
    """int32 [tokens] of a long one."""
    offsets: np.ndarray
    """Characters that each stands for, int64 [tokens, 2]; [0, 2] where they were not asked for."""


def tokens_of(tokenizer: Any, texts: Sequence[str], places: Sequence[str], offsets: bool = False) -> list[Tokens]:
    """The tokens of each text, without those that a tokenizer adds.

    A long text is cut where that changes no token, as far as 2,048 characters on either side tell.
    Raises DataError, with the text's place, where there is no such cut in 4,194,304 characters.
    """
    brief = [text for text in texts if len(text) <= _PIECE]
    found = iter(_tokens(tokenizer, brief, offsets) if brief else ())
    return [
        next(found) if len(text) <= _PIECE else _by_pieces(tokenizer, text, place, offsets)
        for text, place in zip(texts, places, strict=True)
    ]


def _by_pieces(tokenizer: Any, text: str, place: str, offsets: bool) -> Tokens:
    ids, where, at = [], [], 0
    for piece in _pieces(tokenizer, text, place):
        [found] = _tokens(tokenizer, [piece], offsets)
        ids.append(np.asarray(found.ids, np.int32))
        where.append(found.offsets + at)
        at += len(piece)
    return Tokens(np.concatenate(ids), np.concatenate(where))


def _pieces(tokenizer: Any, text: str, place: str) -> Iterator[str]:
    at = 0
    while len(text) - at > _PIECE:
        cut = next((cut for cut in _places(text, at) if _is_free(tokenizer, text, cut)), len(text))
        if cut - at > _MOST:
            seen = f"a text of {len(text):,} characters that the tokenizer takes only as a whole"
            raise DataError(Problem(place, seen, f"at most {_MOST:,}", "Make several documents of it"))
        yield text[at:cut]
        at = cut
    yield text[at:]


def _places(text: str, at: int) -> Iterator[int]:
    """Where one may cut, best kinds first: behind a line, before a word, anywhere."""
    for end in range(at + _PIECE, min(at + _MOST, len(text)) + 1, _PIECE):
        yield from islice((i + 1 for i in _found_back(text, "\n", end - _PIECE // 2, end - 1)), _TRIED)
        yield from islice(_found_back(text, " ", end - _PIECE // 2, end), _TRIED)
        yield from range(end - 1, end - 1 - _TRIED, -1)


def _found_back(text: str, what: str, first: int, last: int) -> Iterator[int]:
    """Where it stands by itself, from the end on."""
    while (last := text.rfind(what, first, last)) >= 0:
        if not text[last - 1].isspace() and not text[last + 1 : last + 2].isspace():
            yield last


def _is_free(tokenizer: Any, text: str, cut: int) -> bool:
    """Whether the tokens around it are the same with the cut and without it."""
    before, after = text[cut - _AROUND : cut], text[cut : cut + _AROUND]
    whole, one, other = _tokens(tokenizer, [before + after, before, after], False)
    return list(whole.ids) == [*one.ids, *other.ids]


def _tokens(tokenizer: Any, texts: list[str], offsets: bool) -> list[Tokens]:
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    found = tokenizer(texts, **options, **({"return_offsets_mapping": True} if offsets else {}))
    where = found["offset_mapping"] if offsets else [()] * len(texts)
    return [
        Tokens(ids, np.array(spans, np.int64).reshape(-1, 2))
        for ids, spans in zip(found["input_ids"], where, strict=True)
    ]
