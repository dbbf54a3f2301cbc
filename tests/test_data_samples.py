"""Documents to samples: windows, masks, counts, the held-out part, and the cache."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.prepare import Data, held_out, open_data, prepare
from trainer.data.preview import preview
from trainer.data.source import IGNORED, Encoded, PreparedSource, Summary, write_part
from trainer.errors import DataError, Problem
from trainer.ranks import Ranks

END = 0
WORDS = ["<end>", "<bos>", *"abcdefgh"]


def tokenizer(beginning: bool = False) -> Any:
    """One token per word; with `beginning`, one that begins every text with <bos>, as Llama's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="h"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if beginning:
        words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", bos_token="<bos>")


def options(path: Any, **changes: Any) -> SimpleNamespace:
    plain = {"format": "auto", "split": "train", "name": None, "text_column": "text", "evaluation_path": None}
    pairs = {"prompt_column": None, "completion_column": None}
    shape = {"sequence_length": 4, "documents": "concatenate", "evaluation_fraction": 0.0}
    return SimpleNamespace(**{"path": str(path), **plain, **pairs, **shape, **changes})


def write_rows(path: Path, *rows: dict[str, str] | str) -> Path:
    objects = [{"text": row} if isinstance(row, str) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in objects))
    return path


def samples(source: PreparedSource) -> list[tuple[list[int], list[int]]]:
    return [(source[i]["input_ids"].tolist(), source[i]["targets"].tolist()) for i in range(len(source))]


def opened(tmp_path: Path, *rows: Any, begins: bool = False, **changes: Any) -> Data:
    path = write_rows(tmp_path / "data.jsonl", *rows)
    return open_data(options(path, **changes), tokenizer(begins), tmp_path / "cache", Ranks())


# Windows

documents = st.lists(
    st.lists(st.integers(1, 9), max_size=12).flatmap(
        lambda tokens: st.integers(1, len(tokens) + 2).map(lambda first: Encoded([*tokens, END], first))
    ),
    max_size=12,
)


def written(parts: list[Encoded], length: int, concatenate: bool) -> tuple[Summary, list[tuple[list[int], list[int]]]]:
    with TemporaryDirectory() as folder:
        summary = write_part(Path(folder, "part"), iter(parts), length, concatenate)
        return summary, samples(PreparedSource(Path(folder, "part"))) if summary.samples else []


def targets_of(parts: list[Encoded]) -> list[tuple[int, int]]:
    """(input, target) pairs by definition, over the documents laid end to end: the target IGNORED if not counted."""
    stream = [(token, at >= part.counted_from) for part in parts for at, token in enumerate(part.tokens)]
    pairs = zip(stream, stream[1:], strict=False)
    return [(before, token if counted else IGNORED) for (before, _), (token, counted) in pairs]


@settings(max_examples=150, deadline=None)
@given(documents, st.integers(2, 7))
def test_concatenated_windows_are_the_stream_cut_in_pieces(parts: list[Encoded], length: int) -> None:
    summary, found = written(parts, length, concatenate=True)
    pairs = targets_of(parts)
    windows = [pairs[at : at + length] for at in range(0, len(pairs), length)]
    whole = [window for window in windows if len(window) == length] or windows
    expected = [window for window in whole if any(target != IGNORED for _, target in window)]
    assert [list(zip(*sample, strict=True)) for sample in found] == expected
    assert summary.targets == sum(target != IGNORED for window in whole for _, target in window)
    assert summary.samples == len(expected)


@settings(max_examples=150, deadline=None)
@given(documents, st.integers(2, 7))
def test_padded_documents_are_samples(parts: list[Encoded], length: int) -> None:
    summary, found = written(parts, length, concatenate=False)
    cut = [targets_of([part])[:length] for part in parts]
    expected = [pairs for pairs in cut if any(target != IGNORED for _, target in pairs)]
    assert [list(zip(*sample, strict=True)) for sample in found] == expected
    assert summary.documents == len(parts) == summary.samples + summary.dropped
    assert summary.truncated == sum(len(part.tokens) > length + 1 for part in parts)


@settings(max_examples=50, deadline=None)
@given(documents, st.integers(2, 7), st.booleans())
def test_the_summary_counts_what_the_samples_hold(parts: list[Encoded], length: int, concatenate: bool) -> None:
    with patch("trainer.data.source._CHUNK", 5):  # many chunks in few tokens
        summary, found = written(parts, length, concatenate)
    counts = Counter(target for _, targets in found for target in targets if target != IGNORED)
    total = sum(counts.values())
    assert summary.targets == total
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    assert summary.unigram_entropy == pytest.approx(entropy, abs=1e-12)
    used = {token for inputs, targets in found for token in inputs + targets}
    assert summary.largest_token_id >= max(used, default=-1)


def test_a_sample_has_the_types_that_collation_expects(tmp_path: Path) -> None:
    sample = opened(tmp_path, "a b c d").train[0]
    assert (sample["input_ids"].dtype, sample["targets"].dtype) == (np.int32, np.int64)


# Documents


def test_concatenated_text(tmp_path: Path) -> None:
    data = opened(tmp_path, "a b c", "", "d", "e f g h")
    assert samples(data.train) == [
        ([2, 3, 4, 0], [3, 4, 0, IGNORED]),  # d begins a document: nothing before it tells of it
        ([5, 0, 6, 7], [0, IGNORED, 7, 8]),
    ]
    summary = data.summary
    assert (summary.documents, summary.tokens, summary.targets, summary.largest_token_id) == (3, 9, 6, 8)
    assert summary.describe() == "3 documents, 9 tokens, 2 samples, 6 targets, unigram entropy 1.56 nats"


def test_padded_text(tmp_path: Path) -> None:
    data = opened(tmp_path, "a b c d e f", "g h", documents="pad")
    assert samples(data.train) == [([2, 3, 4, 5], [3, 4, 5, 6]), ([8, 9], [9, 0])]
    assert data.summary.describe() == (
        "2 documents (1 truncated, 0 dropped), 8 tokens, 2 samples, 6 targets, unigram entropy 1.79 nats"
    )


def test_only_the_completion_counts(tmp_path: Path) -> None:
    rows = [{"q": "a b", "a": "c d"}, {"q": "a b c d e", "a": "f"}, {"q": "", "a": "g h"}]
    columns = {"prompt_column": "q", "completion_column": "a", "documents": "pad"}
    data = opened(tmp_path, *rows, **columns)
    assert samples(data.train) == [([2, 3, 4, 5], [IGNORED, 4, 5, 0]), ([8, 9], [9, 0])]
    assert (data.summary.truncated, data.summary.dropped) == (1, 1)


def test_a_tokenizer_that_begins_texts(tmp_path: Path) -> None:
    columns = {"prompt_column": "q", "completion_column": "a", "documents": "pad"}
    rows = [{"q": "", "a": "a b", "text": "c"}, {"q": "d", "a": "e", "text": "f"}]
    data = opened(tmp_path, *rows, begins=True, **columns)
    assert samples(data.train) == [([1, 2, 3], [2, 3, 0]), ([1, 5, 6], [IGNORED, 6, 0])]
    texts = opened(tmp_path, *rows, begins=True, documents="pad")
    assert samples(texts.train) == [([1, 4], [4, 0]), ([1, 7], [7, 0])]


NOTHING = {
    "empty file": ([], "no documents; expected at least one with text in it"),
    "empty documents": (["", " "], "2 documents, all of them empty; expected at least one with text in it"),
    "no target": (
        [{"q": "a b c d e", "a": "f"}],
        "1 documents without a token to learn (1 have a prompt too long); expected at least one sample. "
        "Raise trainer.data.sequence_length, or add data",
    ),
}


@pytest.mark.parametrize(("rows", "expected"), NOTHING.values(), ids=NOTHING.keys())
def test_data_without_a_sample(tmp_path: Path, rows: list[Any], expected: str) -> None:
    prompted = rows and isinstance(rows[0], dict)
    columns = {"prompt_column": "q", "completion_column": "a", "documents": "pad"} if prompted else {}
    with pytest.raises(DataError) as caught:
        opened(tmp_path, *rows, **columns)
    assert str(caught.value) == f"{tmp_path / 'data.jsonl'}: {expected}"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_broken_line_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", "a b")
    path.write_text(path.read_text() + "{")
    with pytest.raises(DataError, match=r"data.jsonl:2: not JSON: {;"):
        prepare(options(path), tokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# The held-out part


@given(st.integers(2, 400), st.floats(0.001, 0.5))
def test_the_held_out_share(count: int, fraction: float) -> None:
    held = sum(held_out(index, fraction) for index in range(count))
    assert held_out(1, fraction)
    assert not held_out(0, fraction)
    assert abs(held - count * fraction) <= 1


def test_no_document_is_in_both_parts(tmp_path: Path) -> None:
    rows = [f"{first} {second}" for first in "abcdefgh" for second in "abcdefgh"]
    data = opened(tmp_path, *rows, documents="pad", evaluation_fraction=0.25)
    assert data.evaluation is not None
    kept, held = ({(tuple(i), tuple(t)) for i, t in samples(part)} for part in (data.train, data.evaluation))
    assert (len(kept), len(held)) == (48, 16)
    assert not kept & held


def test_one_of_two_documents_is_held_out_and_none_of_one(tmp_path: Path) -> None:
    two = opened(tmp_path, "a b", "c d", evaluation_fraction=0.01)
    assert two.evaluation is not None
    assert samples(two.evaluation) == [([4, 5], [5, 0])]
    assert two.largest_token_id == 5
    assert opened(tmp_path, "a b", evaluation_fraction=0.01).evaluation is None


def test_evaluation_from_a_path_of_its_own(tmp_path: Path) -> None:
    held = write_rows(tmp_path / "held.jsonl", "h h")
    data = opened(tmp_path, "a b", "c d", evaluation_path=str(held), evaluation_fraction=0.5)
    assert data.evaluation is not None
    assert data.summary.documents == 2
    assert samples(data.evaluation) == [([9, 9], [9, 0])]
    assert data.largest_token_id == 9
    write_rows(held, "")
    with pytest.raises(DataError, match="held.jsonl: 1 documents, all of them empty"):
        opened(tmp_path, "a b", evaluation_path=str(held))


# The cache


def test_prepared_once_and_again_when_anything_changes(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", "a b c", "d e f"), tmp_path / "cache"
    first = prepare(options(path), tokenizer(), cache)
    stamp = (first / "train" / "tokens.bin").stat().st_mtime_ns
    assert prepare(options(path), tokenizer(), cache) == first
    assert (first / "train" / "tokens.bin").stat().st_mtime_ns == stamp
    others = [
        prepare(options(path, sequence_length=3), tokenizer(), cache),
        prepare(options(path, documents="pad"), tokenizer(), cache),
        prepare(options(path), tokenizer(beginning=True), cache),
    ]
    write_rows(path, "a b c", "d e f g")
    others.append(prepare(options(path), tokenizer(), cache))
    assert len({first, *others}) == 5 == len(list(cache.iterdir()))


def test_the_fingerprint_is_that_of_the_samples(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    data, moved = opened(tmp_path, "a b c", "d e"), opened(tmp_path / "other", "a b c", "d e")
    assert data.fingerprint == moved.fingerprint
    assert data.fingerprint != opened(tmp_path, "a b d", "d e").fingerprint
    assert data.fingerprint != opened(tmp_path, "a b c", "d e", sequence_length=3).fingerprint


class _Pair(Ranks):
    """A rank of two whose peer is scripted."""

    def __init__(self, peer: Any) -> None:
        super().__init__(0, 2)
        object.__setattr__(self, "peer", peer)

    def gather(self, value: Any) -> list[Any]:
        return [value, self.peer(value)]


def test_ranks_that_prepared_other_samples_are_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", "a b c")
    other = _Pair(lambda value: value if isinstance(value, tuple) else "another")
    with pytest.raises(DataError) as caught:
        open_data(options(path), tokenizer(), tmp_path / "cache", other)
    assert caught.value.problems == (
        Problem(
            str(path),
            "other samples on rank 1 than on rank 0",
            "the same files, and the same versions of Python and the tokenizer, on every machine",
        ),
    )


# Seeing it


def test_preview_shows_what_counts(tmp_path: Path) -> None:
    columns = {"prompt_column": "q", "completion_column": "a", "documents": "pad", "sequence_length": 8}
    data = opened(tmp_path, {"q": "a b", "a": "c d"}, {"q": "", "a": "e f"}, **columns)
    assert preview(data.train, tokenizer()).splitlines() == [
        "sample 0: 4 tokens, 3 count in the loss (+)",
        "  . a b",
        "  + c d <end>",
        "sample 1: 2 tokens, 2 count in the loss (+)",
        "  . e",
        "  + f <end>",
    ]
    narrow = preview(data.train, tokenizer(), count=1, width=10)
    assert narrow.splitlines()[2] == "  + c ...>"


def test_preview_of_windows_over_document_ends(tmp_path: Path) -> None:
    data = opened(tmp_path, *"abcdefgh", "a", sequence_length=16)
    lines = preview(data.train, tokenizer(), count=1).splitlines()
    assert lines[1:4] == ["  . a", "  + <end>", "  . b"]
    assert lines[-1] == "    8 more runs"
