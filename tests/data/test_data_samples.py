"""Documents to samples: windows, masks, counts, the held-out part, and the cache."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.data.text_samples import options, tokenizer, write_rows
from tests.support.messages import raises, shows, shows_each
from trainer.config import DataSection
from trainer.data.mixture import Mixture
from trainer.data.order import KEYED, LISTED, SampleOrder, held_out
from trainer.data.text.cutting import Cut, write_part
from trainer.data.text.preparation import open_data, prepare
from trainer.data.text.prepared import Data
from trainer.data.text.preview import preview
from trainer.data.text.token_files import Arrangement, Encoded, PreparedSource, Summary
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError
from trainer.tasks.task import IGNORED

END = 0


def samples(source: PreparedSource) -> list[tuple[list[int], list[int]]]:
    return [
        (source[i]["input_ids"].tolist(), source[i]["targets"].tolist()) for i in range(len(source))
    ]


def opened(tmp_path: Path, *rows: Any, begins: bool = False, **changes: Any) -> Data:
    path = write_rows(tmp_path / "data.jsonl", *rows)
    return open_data(options(path, **changes), tokenizer(begins), tmp_path / "cache", Ranks())


# Windows

documents = st.lists(
    st.lists(st.integers(1, 9), max_size=12).flatmap(
        lambda tokens: st.integers(1, len(tokens) + 2).map(
            lambda first: Encoded.from_token([*tokens, END], first)
        )
    ),
    max_size=12,
)


def written(
    parts: list[Encoded], length: int, arrangement: Arrangement
) -> tuple[Summary, list[tuple[list[int], list[int]]]]:
    with TemporaryDirectory() as folder:
        summary = write_part(Path(folder, "part"), iter(parts), Cut(length, arrangement))
        return summary, samples(PreparedSource(Path(folder, "part"))) if summary.samples else []


def targets_of(parts: list[Encoded]) -> list[tuple[int, int]]:
    """(input, target) pairs by definition, over the documents laid end to end: the target IGNORED
    if not counted.
    """
    stream = [pair for part in parts for pair in zip(part.tokens, part.counted, strict=True)]
    pairs = zip(stream, stream[1:], strict=False)
    return [(before, token if counted else IGNORED) for (before, _), (token, counted) in pairs]


@settings(max_examples=150, deadline=None)
@given(documents, st.integers(2, 7))
def test_concatenated_windows_are_the_stream_cut_in_pieces(
    parts: list[Encoded], length: int
) -> None:
    summary, result = written(parts, length, "concatenate")
    pairs = targets_of(parts)
    windows = [pairs[at : at + length] for at in range(0, len(pairs), length)]
    whole = [window for window in windows if len(window) == length] or windows
    expected = [window for window in whole if any(target != IGNORED for _, target in window)]
    assert [list(zip(*sample, strict=True)) for sample in result] == expected
    assert summary.targets == sum(target != IGNORED for window in whole for _, target in window)
    assert summary.samples == len(expected)


@settings(max_examples=150, deadline=None)
@given(documents, st.integers(2, 7))
def test_padded_documents_are_samples(parts: list[Encoded], length: int) -> None:
    summary, result = written(parts, length, "pad")
    cut = [targets_of([part])[:length] for part in parts]
    expected = [pairs for pairs in cut if any(target != IGNORED for _, target in pairs)]
    assert [list(zip(*sample, strict=True)) for sample in result] == expected
    assert summary.counts.documents == len(parts) == summary.samples + summary.counts.dropped
    assert summary.counts.truncated == sum(len(part.tokens) > length + 1 for part in parts)


@settings(max_examples=50, deadline=None)
@given(documents, st.integers(2, 7), st.sampled_from(["concatenate", "pad", "pack"]))
def test_the_summary_counts_what_the_samples_hold(
    parts: list[Encoded], length: int, arrangement: Any
) -> None:
    with patch("trainer.data.text.cutting._CHUNK", 5):  # many chunks in few tokens
        summary, result = written(parts, length, arrangement)
    counts = Counter(target for _, targets in result for target in targets if target != IGNORED)
    total = sum(counts.values())
    assert summary.targets == total
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    assert summary.unigram_entropy == pytest.approx(entropy, abs=1e-12)
    used = {token for inputs, targets in result for token in inputs + targets}
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
    assert (summary.counts.documents, summary.tokens, summary.targets) == (3, 9, 6)
    assert summary.largest_token_id == 8
    shows(
        summary.describe(),
        "3 documents (1",
        "9 tokens, 2 samples",
        "6 targets, unigram entropy",
        "1.56 nats",
    )


def test_padded_text(tmp_path: Path) -> None:
    data = opened(tmp_path, "a b c d e f", "g h", documents="pad")
    assert samples(data.train) == [([2, 3, 4, 5], [3, 4, 5, 6]), ([8, 9], [9, 0])]
    shows(
        data.summary.describe(),
        "2 documents (1",
        "8 tokens, 2 samples",
        "6 targets, unigram entropy",
        "1.79 nats",
    )


def test_only_the_completion_counts(tmp_path: Path) -> None:
    rows = [{"q": "a b", "a": "c d"}, {"q": "a b c d e", "a": "f"}, {"q": "", "a": "g h"}]
    columns = {"prompt_column": "q", "completion_column": "a", "documents": "pad"}
    data = opened(tmp_path, *rows, **columns)
    assert samples(data.train) == [([2, 3, 4, 5], [IGNORED, 4, 5, 0]), ([8, 9], [9, 0])]
    assert (data.summary.counts.truncated, data.summary.counts.dropped) == (1, 1)


def test_a_tokenizer_that_begins_texts(tmp_path: Path) -> None:
    columns = {"prompt_column": "q", "completion_column": "a", "documents": "pad"}
    rows = [{"q": "", "a": "a b", "text": "c"}, {"q": "d", "a": "e", "text": "f"}]
    data = opened(tmp_path, *rows, begins=True, **columns)
    assert samples(data.train) == [([1, 2, 3], [2, 3, 0]), ([1, 5, 6], [IGNORED, 6, 0])]
    texts = opened(tmp_path, *rows, begins=True, documents="pad")
    assert samples(texts.train) == [([1, 4], [4, 0]), ([1, 7], [7, 0])]


NOTHING = {
    "empty file": ([], ("no documents", "at least one")),
    "empty documents": (
        ["", " "],
        ("2 documents", "all of them empty", "at least one"),
    ),
    "no target": (
        [{"q": "a b c d e", "a": "f"}],
        (
            "nothing to learn",
            "1 documents (1 truncated",
            "without a target",
            "{}:1)",
            "trainer.data.sequence_length",
        ),
    ),
}


@pytest.mark.parametrize(("rows", "keys"), NOTHING.values(), ids=NOTHING.keys())
def test_data_without_a_sample(tmp_path: Path, rows: list[Any], keys: tuple[str, ...]) -> None:
    prompted = rows and isinstance(rows[0], dict)
    columns = (
        {"prompt_column": "q", "completion_column": "a", "documents": "pad"} if prompted else {}
    )
    with pytest.raises(DataError) as caught:
        opened(tmp_path, *rows, **columns)
    path = tmp_path / "data.jsonl"
    shows(caught.value, f"{path}: {keys[0]}", *(key.format(path) for key in keys[1:]))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_broken_line_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", "a b")
    path.write_text(path.read_text() + "{")
    with pytest.raises(DataError, match=r"data.jsonl:2: not JSON: {;"):
        prepare(options(path), tokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_too_long(tmp_path: Path) -> None:
    rows = ["a b", "a b c d e f", "c"]
    assert len(opened(tmp_path, *rows, documents="pad").train) == 3
    short = opened(tmp_path, *rows, documents="pad", too_long="drop")
    assert len(short.train) == 2
    shows(short.describe(), "3 documents (1 too", "long")
    with raises(DataError, "data.jsonl:2: 6 tokens", "most 4 (trainer.data.sequence_length"):
        opened(tmp_path, *rows, documents="pad", too_long="error")


# The held-out part


@given(st.integers(2, 400), st.floats(0.001, 0.5))
def test_the_held_out_share(count: int, fraction: float) -> None:
    kept = sum(held_out(index, fraction) for index in range(count))
    assert held_out(1, fraction)
    assert not held_out(0, fraction)
    assert abs(kept - count * fraction) <= 1


def test_no_document_is_in_both_parts(tmp_path: Path) -> None:
    rows = [f"{first} {second}" for first in "abcdefgh" for second in "abcdefgh"]
    data = opened(tmp_path, *rows, documents="pad", evaluation_fraction=0.25)
    assert data.evaluations
    kept, locked = (
        {(tuple(i), tuple(t)) for i, t in samples(part)}
        for part in (data.train, data.evaluations[""])
    )
    assert (len(kept), len(locked)) == (48, 16)
    assert not kept & locked


def test_one_of_two_documents_is_held_out_and_none_of_one(tmp_path: Path) -> None:
    two = opened(tmp_path, "a b", "c d", evaluation_fraction=0.01)
    assert two.evaluations
    assert samples(two.evaluations[""]) == [([4, 5], [5, 0])]
    assert two.largest_token_id == 5
    assert not opened(tmp_path, "a b", evaluation_fraction=0.01).evaluations


def test_evaluation_from_a_path_of_its_own(tmp_path: Path) -> None:
    kept = write_rows(tmp_path / "held.jsonl", "h h")
    data = opened(tmp_path, "a b", "c d", evaluation_path=str(kept), evaluation_fraction=0.5)
    assert data.evaluations
    assert data.summary.counts.documents == 2
    assert samples(data.evaluations[""]) == [([9, 9], [9, 0])]
    assert data.largest_token_id == 9
    write_rows(kept, "")
    with raises(DataError, "held.jsonl: 1 documents", "empty"):
        opened(tmp_path, "a b", evaluation_path=str(kept))


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
    """Rank 0 of two, whose peer sees the same folders and other samples in them."""

    def send(self, source: int, value: Any) -> Any:
        return value

    def _least(self, number: int) -> int:
        return number

    def await_first(self, work: Any) -> Any:
        return work()

    def differing(self, value: Any) -> list[int]:
        return [1]


def test_ranks_that_prepared_other_samples_are_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", "a b c")
    with pytest.raises(DataError) as caught:
        open_data(options(path), tokenizer(), tmp_path / "cache", _Pair(0, 2))
    (problem,) = caught.value.problems
    assert problem.place == str(path)
    shows(problem, "other samples on rank 1", "rank 0", "versions")


# Seeing it


def test_preview_shows_what_counts(tmp_path: Path) -> None:
    columns = {
        "prompt_column": "q",
        "completion_column": "a",
        "documents": "pad",
        "sequence_length": 8,
    }
    data = opened(tmp_path, {"q": "a b", "a": "c d"}, {"q": "", "a": "e f"}, **columns)
    shows_each(
        preview(data.train, tokenizer(), [0, 1]).splitlines(),
        ("sample 0: 4 tokens", "3 count", "loss (+)"),
        "  . a b",
        "  + c d <end>",
        ("sample 1: 2 tokens", "2 count", "loss (+)"),
        "  . e",
        "  + f <end>",
    )
    narrow = preview(data.train, tokenizer(), numbers=[0], width=10)
    shows(narrow.splitlines()[2], "+ c ...>")


def test_preview_of_windows_over_document_ends(tmp_path: Path) -> None:
    data = opened(tmp_path, *"abcdefgh", "a", sequence_length=16)
    lines = preview(data.train, tokenizer(), [0]).splitlines()
    assert lines[1:4] == ["  . a", "  + <end>", "  . b"]
    shows(lines[-1], "8 more runs")


# Mixtures


def mixed(tmp_path: Path, seed: int = 0, **shares: Any) -> Data:
    """Two sources, of 8 and 3 documents of a word each."""
    for name, words in (("one", "abcdefgh"), ("two", "abc")):
        (tmp_path / name).mkdir(exist_ok=True)
        write_rows(tmp_path / name / "rows.jsonl", *words)
    given = [
        {"path": str(tmp_path / name), "label": name, **shares.get(name, {})}
        for name in ("one", "two")
    ]
    options = DataSection(
        sources=given, sequence_length=4, documents="pad", evaluation_fraction=0.0
    )
    return open_data(options, tokenizer(), tmp_path / "cache", Ranks(), SampleOrder(seed))


def drawn(data: Data, epoch: int) -> list[tuple[int, int]]:
    return [data.train.place(index, epoch) for index in range(len(data.train))]  # type: ignore[attr-defined]


def test_a_mixture_has_of_each_source_what_was_asked_for(tmp_path: Path) -> None:
    data = mixed(tmp_path, one={"epochs": 0.5}, two={"epochs": 3})
    assert [share.samples for share in data.shares] == [4, 9]
    shows(data.describe(), "2 sources, 13 samples", "epoch", "11 that")
    shows(data.lines()[1], "9 samples", "epoch (69.2%", "3.00 times", "3 documents")
    of_each = [int(re.findall(r": ([0-9,]+) samples an epoch", line)[0]) for line in data.lines()]
    assert sum(of_each) == len(data.train)
    first, second = drawn(data, 0), drawn(data, 1)
    assert Counter(first[4:]) == Counter({(1, number): 3 for number in range(3)})
    assert sorted(first[:4] + second[:4]) == [
        (0, number) for number in range(8)
    ]  # each once in two epochs
    weighted = mixed(tmp_path, one={"weight": 1}, two={"weight": 3})
    assert [share.samples for share in weighted.shares] == [3, 8]
    assert weighted.fingerprint != data.fingerprint


def test_a_mixture_is_a_function_of_seed_epoch_and_number(tmp_path: Path) -> None:
    data, again = (mixed(tmp_path, one={"epochs": 0.4}, two={"epochs": 1.7}) for _ in range(2))
    assert (
        drawn(data, 7) == [again.train.place(i, 7) for i in reversed(range(len(again.train)))][::-1]
    )  # type: ignore[attr-defined]
    assert drawn(data, 7) != drawn(mixed(tmp_path, 1, one={"epochs": 0.4}, two={"epochs": 1.7}), 7)
    sample = data.train.in_epoch(0, 7)  # type: ignore[attr-defined]
    assert sample["targets"].tolist() == [END]


def test_the_shuffles_of_an_old_mixture_never_change() -> None:
    """A run that began with them resumes with them."""
    mixture = Mixture([range(5), range(9)], [3, 4], SampleOrder(7, LISTED))  # type: ignore[list-item]
    results = [mixture.place(index, epoch) for epoch in (0, 3) for index in range(7)]
    expected = []
    for epoch in (0, 3):
        for which, (size, count) in enumerate([(5, 3), (9, 4)]):
            for position in range(epoch * count, (epoch + 1) * count):
                turn, at = divmod(position, size)
                order = np.random.Generator(np.random.PCG64([7, which, turn, 1])).permutation(size)
                expected.append((which, int(order[at])))
    assert results == expected


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 6),
    st.sampled_from([LISTED, KEYED]),
)
def test_each_sample_is_seen_equally_often(
    parts: list[tuple[int, int]], seed: int, epochs: int, order: int
) -> None:
    sizes, counts = zip(*parts, strict=True)
    mixture = Mixture([range(size) for size in sizes], counts, SampleOrder(seed, order))  # type: ignore[misc]
    actual = Counter(
        mixture.place(index, epoch) for epoch in range(epochs) for index in range(len(mixture))
    )
    for which, (size, count) in enumerate(parts):
        times = [actual[which, number] for number in range(size)]
        assert sum(times) == epochs * count and max(times) - min(times) <= 1


def test_named_evaluations(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_rows(tmp_path / f"{name}.jsonl", *"abc")
    paths: Any = {name: str(tmp_path / f"{name}.jsonl") for name in ("one", "two")}
    data = opened(tmp_path, "a b c d e", evaluation_path=paths, documents="pad")
    assert {name: len(source) for name, source in data.evaluations.items()} == {"one": 3, "two": 3}


# Packed


def test_preview_draws_the_borders_of_packed_documents(tmp_path: Path) -> None:
    columns = {
        "prompt_column": "q",
        "completion_column": "a",
        "documents": "pack",
        "sequence_length": 7,
    }
    rows = [{"q": "a b", "a": "c d"}, {"q": "", "a": "e f g"}, {"q": "", "a": "h"}]
    data = opened(tmp_path, *rows, **columns)
    shows(data.describe(), "3 documents, 11 tokens", "2 samples", "kept apart, 57.1%", "7 targets")
    shows_each(
        preview(data.train, tokenizer(), [0]).splitlines(),
        ("sample 0: 7 tokens", "2 documents, 6 count", "loss (+)"),
        "  . a b",
        "  + c d <end>",
        "document 2",
        "  . e",
        "  + f g <end>",
    )
    many = opened(tmp_path, *"abcdef", documents="pack", sequence_length=8)
    shows(preview(many.train, tokenizer(), [0]).splitlines()[-1], "2 more documents")


def test_what_makes_other_samples_is_told_from_what_a_checkpoint_says(tmp_path: Path) -> None:
    rows = ("a b c", "d e f g", "h")
    kinds = ({}, {"isolate": True}, {"documents": "pack"}, {"documents": "pad"})
    results = [opened(tmp_path, *rows, **kind) for kind in kinds]
    assert (
        len({data.fingerprint for data in results})
        == len({str(data.description()) for data in results})
        == 4
    )
    assert [("fill" in data.description()) for data in results] == [False, True, True, False]
