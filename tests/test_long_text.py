"""A document of many megabytes on one line: the tokens that it has, in bounded memory."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.test_data_samples import options, tokenizer
from trainer.data import corpus, long_text
from trainer.data.long_text import tokens_of
from trainer.data.prepare import prepare
from trainer.data.source import PreparedSource
from trainer.data.tokenizer import embedded_tokenizer
from trainer.errors import DataError

FORK = multiprocessing.get_context("fork")
MEGABYTES = 50
GROWTH = 8
"""Bytes of memory for each of the line, at most: it as it is read, as text, as parsed, and its tokens."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return embedded_tokenizer(tmp_path_factory.mktemp("cache"))


def metaspace() -> Any:
    """One that begins each text with a mark of its own, as Llama 2's does: no word can be cut for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE({"<unk>": 0, "\u2581": 1, "a": 2, "b": 3}, [], unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<unk>")


SOME = list(corpus.documents())[:40]
TEXTS = {
    "code": "".join(SOME),
    "one line": " ".join("".join(SOME).split()),
    "no spaces": "".join("".join(SOME).split()),
    "other letters": "".join(chr(0x4E00 + ord(letter)) for letter in "".join(SOME) if letter.isalnum()),
    "blank lines": "\n\n".join(" ".join(text.split()[:30]) for text in SOME),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_pieces_have_the_tokens_of_the_whole(trained: Any, kind: str) -> None:
    text = TEXTS[kind]
    [whole] = tokens_of(trained, [text], [""], offsets=True)
    with patch.multiple(long_text, _PIECE=5000, _MOST=20_000), patch.object(long_text, "_AROUND", 500):
        assert len(list(long_text._pieces(trained, text, ""))) >= len(text) // 5000
        brief, cut = tokens_of(trained, [text[:100], text], ["", ""], offsets=True)
    assert isinstance(brief.ids, list) and isinstance(cut.ids, np.ndarray)
    assert cut.ids.tolist() == whole.ids
    assert np.array_equal(cut.offsets, whole.offsets)


def test_a_text_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n' + json.dumps({"text": "ab" * 6000}))
    with patch.multiple(long_text, _PIECE=2000, _MOST=8000, _AROUND=200), pytest.raises(DataError) as caught:
        prepare(options(tmp_path / "data.jsonl"), metaspace(), tmp_path / "cache")
    seen = "a text of 12,000 characters that the tokenizer takes only as a whole; expected at most 8,000"
    assert str(caught.value) == f"{tmp_path / 'data.jsonl'}:2: {seen}. Make several documents of it"
    with patch.multiple(long_text, _PIECE=2000, _MOST=16_000, _AROUND=200):
        prepare(options(tmp_path / "data.jsonl"), metaspace(), tmp_path / "cache")


def _grown(path: Path, cache: Path, told: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = prepare(options(path, sequence_length=1024, workers=1), tokenizer(), cache)
    told.send(
        (PreparedSource(folder / "train").summary.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    )


def test_a_line_of_50_megabytes_takes_bounded_memory(tmp_path: Path) -> None:
    path, chance = tmp_path / "data.jsonl", random.Random(0)
    words = [chance.choice("abcdefgh") * 9 for _ in range(1000)]
    count = MEGABYTES * 100_000
    with open(path, "w") as file:
        file.write('{"text": "' + " ".join(chance.choice(words) for _ in range(1000)) * (count // 1000) + '"}\n')
    assert path.stat().st_size > MEGABYTES * 0.99e6
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_grown, args=(path, tmp_path / "cache", theirs))
    child.start()
    theirs.close()
    tokens, kilobytes = ours.recv()
    child.join()
    assert tokens > count * 0.99
    assert kilobytes * 1024 < GROWTH * path.stat().st_size
