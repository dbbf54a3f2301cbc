"""Rows that are pairs of answers, in the forms in which data sets have them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.command.language_model import tokenizer
from tests.support.messages import raises
from trainer.config.sections.pair_losses import PairedDataSection
from trainer.data.sources.location import locate
from trainer.data.text.chats.turns import Chat
from trainer.data.text.cutting import Cut, CutDocuments, PartWriter
from trainer.data.text.encode import Chunk, Tokenising
from trainer.data.text.preferences import kinds_of_pairs
from trainer.data.text.records import Preference, Ranking, Text, read_documents
from trainer.data.text.token_files import Encoded, EncodedPair, Origin, PreparedPairs, opened_part
from trainer.errors import DataError
from trainer.tasks.task import IGNORED

QUESTION = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}


def read(folder: Path, *rows: dict[str, Any], **options: Any) -> list[Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = PairedDataSection(path=str(path), **options)
    return list(read_documents(locate(str(path), "auto"), section, kinds=kinds_of_pairs(section)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "chosen": [FOUR], "rejected": [FIVE]},
        {"chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
        {"prompt": "2 + 2?", "chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
        {"prompt": [QUESTION], "chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
        {"prompt": "2 + 2?", "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": [QUESTION], "chosen": "4", "rejected": "5"},
    ],
    ids=["apart", "inside", "both", "repeated", "a text", "texts"],
)
def test_messages(row: dict[str, Any], tmp_path: Path) -> None:
    [pair] = read(tmp_path, row)
    assert isinstance(pair, Preference)
    sides = [("4", pair.chosen), ("5", pair.rejected)]
    for answer, chat in sides:
        assert isinstance(chat, Chat)
        assert [message["content"] for message in chat.messages] == ["2 + 2?", answer]
        assert chat.learned_from == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2 is ", "chosen": "four", "rejected": "five"},
        {"chosen": "2 + 2 is four", "rejected": "2 + 2 is five"},
    ],
    ids=["apart", "inside"],
)
def test_texts(row: dict[str, Any], tmp_path: Path) -> None:
    """What both begin with is the prompt, up to a word's beginning: f is none of it."""
    [pair] = read(tmp_path, row | {"margin": 1.5})
    answers = [pair.chosen, pair.rejected]
    assert [(one.prompt, one.text) for one in answers] == [
        ("2 + 2 is ", "four"),
        ("2 + 2 is ", "five"),
    ]
    assert all(isinstance(one, Text) for one in answers)
    assert pair.margin == 1.5


def test_other_columns(tmp_path: Path) -> None:
    row = {"q": "a ", "better": "b", "worse": "c"}
    columns = {"prompt_column": "q", "chosen_column": "better", "rejected_column": "worse"}
    [pair] = read(tmp_path, row, **columns)
    assert (pair.chosen.prompt, pair.chosen.text, pair.rejected.text) == ("a ", "b", "c")


SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, {"records": "chat"}),
        ({"q": "2 + 2?", "a": "4", "b": "5"}, {"records": "chat"}),
        ({"prompt": "2 + 2?", "chosen": FOUR, "rejected": FIVE}, {}),
        (
            {
                "conversations": [{"from": "human", "value": "2 + 2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            {"prompt_column": "conversations"},
        ),
        ({"instruction": "2 + 2?", "chosen": "4", "rejected": "5"}, {"records": "instruction"}),
        (
            {"prompt": "2 + 2?", "chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
            {"records": "chat"},
        ),
    ],
    ids=["texts", "columns", "one message", "sharegpt", "instruction", "messages"],
)
def test_texts_as_turns(row: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    if "q" in row:
        options = options | dict(
            zip(("prompt_column", "chosen_column", "rejected_column"), row, strict=True)
        )
    [pair] = read(tmp_path, row | {"system": SYSTEM["content"]}, **options)
    for answer, chat in ((FOUR, pair.chosen), (FIVE, pair.rejected)):
        assert isinstance(chat, Chat)
        assert (chat.messages, chat.learned_from) == ([SYSTEM, QUESTION, answer], 2)


def test_an_instruction_has_its_input_and_history(tmp_path: Path) -> None:
    row = {"instruction": "add", "input": "2, 2", "history": [["hi", "hello"]]}
    [pair] = read(tmp_path, row | {"chosen": "4", "rejected": "5"}, records="instruction")
    contents = [message["content"] for message in pair.chosen.messages]
    assert (contents, pair.chosen.learned_from) == (["hi", "hello", "add\n2, 2", "4"], 3)
    assert read(tmp_path, row | {"chosen": "4", "rejected": " "}, records="instruction") == [None]
    with raises(DataError, "instruction"):
        read(tmp_path, {"chosen": "4", "rejected": "5"}, records="instruction")


def test_a_shared_answer_is_no_prompt(tmp_path: Path) -> None:
    """Turns up to the first difference are the prompt, but it does not end with an answer."""
    more = {"role": "user", "content": "sure?"}
    chosen = [QUESTION, FOUR, more, FOUR]
    [pair] = read(tmp_path, {"chosen": chosen, "rejected": [QUESTION, FOUR, more, FIVE]})
    assert pair.chosen.learned_from == 3
    [pair] = read(tmp_path, {"chosen": [QUESTION, FOUR], "rejected": [QUESTION, FOUR]})
    assert pair.chosen.learned_from == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, ("KTO", "chosen")),
        ({"prompt": "a", "chosen": "b"}, ("rejected",)),
        ({"chosen": "a b", "rejected": [FIVE]}, ("one kind",)),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, ("margin", "finite")),
        ({"chosen": [QUESTION], "rejected": [QUESTION]}, ("no answer",)),
    ],
    ids=["labels", "column", "kinds", "margin", "answer"],
)
def test_wrong_rows(row: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    with raises(DataError, *words):
        read(tmp_path, row)


def test_a_row_without_an_answer_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": " "}) == [None]


def written(folder: Path, *pairs: EncodedPair, **cut: Any) -> PreparedPairs:
    some = CutDocuments()
    for pair in pairs:
        some.add_pair(pair, Cut(4, "pairs", **cut))
    writer = PartWriter(folder / "part")
    writer.append(some)
    writer.finish(Cut(4, "pairs"), Origin())
    part = opened_part(folder / "part")
    assert isinstance(part, PreparedPairs)
    return part


def pair_of(prompt: int, chosen: int, rejected: int, margin: float = 0.0) -> EncodedPair:
    sides = [list(range(1, prompt + answer + 1)) for answer in (chosen, rejected)]
    better, worse = (Encoded.from_token(tokens, prompt) for tokens in sides)
    return EncodedPair(better, worse, margin)


def test_both_are_cut_at_the_same_token_or_left_out_together(tmp_path: Path) -> None:
    part = written(tmp_path, pair_of(2, 9, 2), pair_of(5, 1, 3), pair_of(1, 1, 2, 0.5))
    assert len(part) == 2  # the prompt of the second fills the sequence
    assert (part.summary.counts.truncated, part.summary.counts.dropped) == (2, 1)
    sample = part[0]
    assert sample["chosen"]["input_ids"].tolist() == [1, 2, 3, 4]
    assert sample["chosen"]["targets"].tolist() == [IGNORED, 3, 4, 5]
    assert sample["rejected"]["targets"].tolist() == [IGNORED, 3, 4]
    assert part[1]["margin"] == 0.5
    assert "reference" not in sample
    part.refer_to(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert part[1]["reference"].tolist() == [3.0, 4.0]


def test_too_long_pairs_are_dropped_whole(tmp_path: Path) -> None:
    part = written(tmp_path, pair_of(2, 9, 2), pair_of(1, 1, 2), too_long="drop")
    assert (len(part), part.summary.counts.too_long) == (1, 1)


def test_margins_are_in_the_fingerprint(tmp_path: Path) -> None:
    parts = []
    for margin in (0.0, 0.5):
        folder = tmp_path / str(margin)
        folder.mkdir()
        parts.append(written(folder, pair_of(1, 1, 2, margin)))
    assert parts[0].summary.fingerprint != parts[1].summary.fingerprint


def ranked(folder: Path, row: dict[str, Any], best: bool = False) -> list[tuple[str, str]]:
    """Read a row of ranked answers; return the answers of its pairs."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2 is ", **row}))
    section = PairedDataSection(path=str(path))
    kinds = kinds_of_pairs(section, "best" if best else "all")
    [ranking] = read_documents(locate(str(path), "auto"), section, kinds=kinds)
    assert isinstance(ranking, Ranking)
    assert {pair.chosen.prompt for pair in ranking.pairs if isinstance(pair.chosen, Text)} == {
        "2 + 2 is "
    }
    sides = [(pair.chosen, pair.rejected) for pair in ranking.pairs]
    return [(a.text, b.text) for a, b in sides if isinstance(a, Text) and isinstance(b, Text)]


def test_ranked_answers_are_all_their_pairs(tmp_path: Path) -> None:
    answers = {"answers": ["a", "b", "c"]}
    every = [("a", "b"), ("a", "c"), ("b", "c")]
    assert ranked(tmp_path, answers) == every
    assert ranked(tmp_path, answers, best=True) == every[:2]
    scores = {"scores": [1, 3.5, 1]}
    assert ranked(tmp_path, answers | scores) == [("b", "a"), ("b", "c")]
    assert ranked(tmp_path, {"answers": ["a", " ", "c"]}) == [("a", "c")]
    assert read(tmp_path, {"prompt": "p", "answers": ["a"]}) == [None]
    [ranking] = read(tmp_path, {"prompt": [QUESTION], "answers": [FOUR, [FIVE]]})
    [pair] = ranking.pairs
    assert (pair.chosen.messages, pair.rejected.messages) == ([QUESTION, FOUR], [QUESTION, FIVE])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "answers": "b"}, ("answers", "a list")),
        ({"answers": ["a", "b"]}, ("prompt",)),
        ({"prompt": "a", "answers": ["b", "c"], "scores": [1]}, ("scores", "2 finite")),
        ({"prompt": "a", "answers": ["b", "c"], "margin": 1}, ("margin", "scores")),
        ({"prompt": "a", "answers": ["b"], "chosen": "b", "rejected": "c"}, ("ranked",)),
    ],
    ids=["no list", "no prompt", "scores", "margin", "both"],
)
def test_ranked_answers_that_can_not_be_read(
    row: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    with raises(DataError, *words):
        read(tmp_path, row)


def test_the_pairs_of_a_row_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} ", "answers": ["a", "b", "c"]} for n in range(8)]
    documents = read(tmp_path, *rows)
    template: Any = SimpleNamespace(tokenizer=tokenizer())
    work = Tokenising(template, Cut(16, "pairs"), 0.25)
    done = work(Chunk(0, documents))
    assert (done.train.counts.documents, done.held_out.counts.documents) == (18, 6)
