"""Labelled rows: which kind they are, what their labels are, and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.labels import tokenizer_of
from tests.support.messages import raises
from trainer.config.sections.labels import LabelsSection
from trainer.config.sections.model_and_data import DataSection
from trainer.data.progress import QUIET
from trainer.data.text.chats.chat import Template
from trainer.distributed.ranks import ALONE
from trainer.errors import DataError
from trainer.recipes.labels import samples
from trainer.recipes.labels.encoded import Encoder
from trainer.recipes.labels.rows import kind_in
from trainer.recipes.labels.samples import Known, LabelData


def opened(
    folder: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **keys: Any
) -> LabelData:
    """Prepare rows; `keys`: those of the labels' section, and `data`, some of the data's."""
    monkeypatch.setattr(samples, "cache_folder", lambda: folder / "cache")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"path": str(path), "sequence_length": 8, "evaluation_fraction": 0.0}
    data = DataSection(**options | keys.pop("data", {}))
    labels = LabelsSection(**keys)
    tokenizer = tokenizer_of(eos_token="[SEP]")
    template = Template.of(tokenizer, data.chat_template)
    encoder = Encoder(tokenizer, template, data.sequence_length, data.too_long)
    known = Known(kind_in(data, labels), labels.names)
    return samples.open_samples(data, labels, encoder, known, ALONE, QUIET)


def labels_of(data: LabelData) -> list[Any]:
    return [np.asarray(data.train[n]["labels"]).tolist() for n in range(len(data.train))]


Case = tuple[list[Any], dict[str, Any], str, list[Any], list[str]]
CASES: dict[str, Case] = {
    "numbers": ([0, 2, 1], {}, "single", [0, 2, 1], []),
    "names": (["b", "a", "b"], {}, "single", [1, 0, 1], ["a", "b"]),
    "names in order": (["b", "a"], {"names": ["b", "a"]}, "single", [0, 1], ["b", "a"]),
    "true or false": ([True, False], {}, "single", [1, 0], []),
    "a number": ([0.5, 3, -1.0], {}, "regression", [[0.5], [3.0], [-1.0]], []),
    "numbers that are no classes": (
        [1, 5],
        {"kind": "regression"},
        "regression",
        [[1.0], [5.0]],
        [],
    ),
    "two numbers": ([[1.0, 2.0]], {"kind": "regression"}, "regression", [[1.0, 2.0]], []),
    "several names": ([["b"], [], ["a", "b"]], {}, "multi", [[0, 1], [0, 0], [1, 1]], ["a", "b"]),
    "several numbers": ([[2], [0, 1]], {}, "multi", [[0, 0, 1], [1, 1, 0]], []),
    "a number a class": ([[0.0, 1.0]], {"kind": "multi"}, "multi", [[0, 1]], []),
}
"""Labels, keys; the kind, the stored labels and the names of classes."""


@pytest.mark.parametrize("name", CASES)
def test_labels_of_texts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, keys, kind, stored, names = CASES[name]
    rows = [{"text": "a b", "label": label} for label in labels]
    data = opened(tmp_path, rows, monkeypatch, **keys)
    assert (data.kind, list(data.names)) == (kind, names)
    assert labels_of(data) == stored
    assert data.train[0]["input_ids"].tolist() == [2, 4, 5, 3]


def test_a_second_text_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "a", "other": "b", "label": 1}, {"text": "a b", "other": "b", "label": 0}]
    data = opened(tmp_path, rows, monkeypatch, pair_column="other")
    assert data.train[0]["input_ids"].tolist() == [2, 4, 3, 5, 3]
    assert data.train[0]["token_type_ids"].tolist() == [0, 0, 0, 1, 1]
    assert data.train[1]["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1]


def test_the_first_token_of_a_word_has_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"tokens": ["ab", "c"], "ner_tags": ["X", "O"]}, {"tokens": ["d"], "ner_tags": ["O"]}]
    data = opened(tmp_path, rows, monkeypatch)
    assert (data.kind, list(data.names)) == ("tokens", ["O", "X"])
    assert data.train[0]["input_ids"].tolist() == [2, 4, 5, 6, 3]
    assert labels_of(data) == [[-100, 1, -100, 0, -100], [-100, 0, -100]]


def test_answers_have_their_prompt_and_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"prompt": "a ", "chosen": "b c", "rejected": "d", "margin": 0.5},
        {"prompt": "a ", "chosen": "b", "rejected": "c"},
    ]
    data = opened(tmp_path, rows, monkeypatch)
    assert data.kind == "reward"
    first, second = (data.train[number] for number in range(2))
    assert first["chosen"].tolist()[:4] == [2, 4, 5, 6]
    assert first["rejected"].tolist()[:3] == [2, 4, 7]
    assert [first["margin"], second["margin"]] == [0.5, 0.0]


def test_answers_of_other_columns_as_turns_of_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"}
    turns = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    data = opened(
        tmp_path,
        [{"q": "a", "good": "b", "bad": "c"}],
        monkeypatch,
        data={**columns, "records": "chat", "sequence_length": 64},
    )
    assert data.kind == "reward"
    messages = {"prompt": turns[0], "chosen": turns[1], "rejected": turns[1]}
    same = opened(tmp_path, [messages], monkeypatch, data={"sequence_length": 64})
    assert data.train[0]["chosen"].tolist() == same.train[0]["chosen"].tolist()
    plain = opened(tmp_path, [{"q": "a", "good": "b", "bad": "c"}], monkeypatch, data=columns)
    assert len(plain.train[0]["chosen"]) < len(data.train[0]["chosen"])


@pytest.mark.parametrize(("too_long", "count"), [("truncate", 2), ("drop", 1)])
def test_texts_that_are_too_long(
    too_long: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut ones keep the tokenizer's last token, which a head may be on."""
    rows = [{"text": "a b c d e f g h", "label": 0}, {"text": "a", "label": 1}]
    data = opened(tmp_path, rows, monkeypatch, data={"too_long": too_long})
    assert len(data.train) == count
    assert all(data.train[n]["input_ids"][-1] == 3 for n in range(count))
    assert data.longest <= 8


WRONG: dict[str, tuple[list[dict[str, Any]], dict[str, Any], tuple[str, ...]]] = {
    "no label": ([{"text": "a"}], {}, ("rows.jsonl:1", "label", "text")),
    "an empty label": ([{"text": "a", "label": None}], {}, ("rows.jsonl:1", "label", "nothing")),
    "no text": ([{"body": "a", "label": 1}], {}, ("rows.jsonl:1", "text", "body")),
    "a fraction among classes": (
        [{"text": "a", "label": 1}, {"text": "a", "label": 0.5}],
        {},
        ("rows.jsonl:2", "0.5", "regression"),
    ),
    "names and numbers": (
        [{"text": "a", "label": "x"}, {"text": "a", "label": 1}],
        {},
        ("rows.jsonl:2", "names"),
    ),
    "an unknown name": (
        [{"text": "a", "label": "x"}],
        {"names": ["y", "z"]},
        ("rows.jsonl:1", "x", "y"),
    ),
    "floats of no said meaning": ([{"text": "a", "label": [0.0, 1.0]}], {}, ("kind", "multi")),
    "labels for fewer words": (
        [{"tokens": ["a", "b"], "ner_tags": [0]}],
        {},
        ("rows.jsonl:1", "1 labels", "2"),
    ),
    "no answers": ([{"text": "a", "label": 1}], {"kind": "reward"}, ("rows.jsonl:1", "chosen")),
    "an empty answer": (
        [{"prompt": "a", "chosen": "b", "rejected": " "}],
        {},
        ("rows.jsonl:1", "empty"),
    ),
    "too long": (
        [{"text": "a b c d e f g h", "label": 0}],
        {"data": {"too_long": "error"}},
        ("rows.jsonl:1", "sequence_length"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, keys, words = WRONG[name]
    with raises(DataError, *words):
        opened(tmp_path, rows, monkeypatch, **keys)


def test_held_out_labels_are_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names have the numbers that they have in training, and another one is an error."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"text": "a", "label": "c"}\n')
    rows = [{"text": "a", "label": name} for name in "abc"]
    data = opened(tmp_path, rows, monkeypatch, data={"evaluation_path": str(held_out)})
    assert int(data.evaluations[""][0]["labels"]) == 2
    held_out.write_text('{"text": "a", "label": "d"}\n')
    with raises(DataError, "held_out.jsonl:1", "d"):
        opened(tmp_path, rows, monkeypatch, data={"evaluation_path": str(held_out)})
