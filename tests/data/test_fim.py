"""Fill-in-the-middle: what texts become, and that nothing but their number decides it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import raises
from tests.support.training import VOCABULARY
from trainer.config.sections.fim import FimSection
from trainer.config.sections.model_and_data import DataSection
from trainer.data.text.fill_in_the_middle import NAMES, FillInTheMiddle
from trainer.data.text.preparation import open_data, prepare
from trainer.data.text.token_files import opened_part
from trainer.data.text.tokenizer import end_of_text
from trainer.distributed.ranks import ALONE
from trainer.errors import ConfigError, DataError

TEXT = "w5 w6 w7 w8 w9 w10 w11 w12"
P, S, M = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of letters, so that a cut between any two of them is one between tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(ord("a") + n): n for n in range(26)} | {" ": 26, "<end>": 27}
    inner = Tokenizer(models.WordLevel(letters, "<end>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.add_special_tokens({"additional_special_tokens": list(NAMES[0])})
    return made


TEXTS = ["".join(chr(ord("a") + (n + m) % 26) for m in range(n % 17 + 1)) for n in range(200)]


def prepared(
    folder: Path, tokenizer: Any, fim: dict[str, Any] | None, **options: Any
) -> list[list[int]]:
    """The tokens of the documents, as they are prepared."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    usual = {"documents": "pad", "sequence_length": 64, "evaluation_fraction": 0.0}
    data = DataSection(path=str(path), fim=fim, **usual | options)
    train = opened_part(prepare(data, tokenizer, folder / "cache") / "train")
    samples = (train[number] for number in range(len(train)))
    return [[int(one["input_ids"][0]), *map(int, one["targets"])] for one in samples]


def put_together(tokens: list[int], ids: tuple[int, int, int], end: int) -> tuple[list[int], str]:
    """The text that was cut, and how; by nothing but the two formats."""
    first, second, third = ids
    assert tokens[-1] == end
    if tokens[0] != first:
        return tokens[:-1], "whole"
    middle = tokens.index(third)
    if tokens[1] == second and middle >= 2:
        at = tokens.index(second)
        return [*tokens[middle + 1 : -1], *tokens[at + 1 : middle]], "SPM"
    at = tokens.index(second)
    return [*tokens[1:at], *tokens[middle + 1 : -1], *tokens[at + 1 : middle]], "PSM"


def test_no_token_of_a_text_is_lost(tmp_path: Path, tokenizer: Any) -> None:
    fim = FillInTheMiddle.of(FimSection(), tokenizer)
    made = prepared(tmp_path, tokenizer, {"rate": 0.5, "spm_rate": 0.5})
    assert len(made) == len(TEXTS)
    kinds = []
    for text, tokens in zip(TEXTS, made, strict=True):
        whole, kind = put_together(tokens, fim.ids, end_of_text(tokenizer))
        assert tokenizer.decode(whole) == text
        kinds.append(kind)
    shares = {kind: kinds.count(kind) / len(kinds) for kind in ("whole", "PSM", "SPM")}
    assert 0.4 < shares["whole"] < 0.6
    assert 0.15 < shares["PSM"] < 0.35
    assert 0.15 < shares["SPM"] < 0.35


def test_a_text_s_number_alone_decides(tmp_path: Path, tokenizer: Any) -> None:
    """Not the processes that prepare it, nor the rows around it."""
    one = prepared(tmp_path, tokenizer, {"rate": 1.0}, workers=1)
    two = prepared(tmp_path, tokenizer, {"rate": 1.0}, workers=2, max_rows=len(TEXTS) - 1)
    assert one[:-1] == two
    assert prepared(tmp_path, tokenizer, {"rate": 0.0}) == prepared(tmp_path, tokenizer, None)
    fim = FillInTheMiddle(1.0, 0.5, (1, 2, 3))
    cuts = {fim.pieces(number, "abcdef") for number in range(200)}
    assert len(cuts) > 30
    assert {len(one.prefix) for one in cuts if one} == set(range(7))


def test_a_text_that_would_be_cut_off_stays_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    made = prepared(tmp_path, tokenizer, {"rate": 1.0}, sequence_length=14)
    whole = prepared(tmp_path, tokenizer, None, sequence_length=14)
    longest = [n for n, text in enumerate(TEXTS) if len(text) + 4 > 15]
    assert longest
    for number, (one, other) in enumerate(zip(made, whole, strict=True)):
        assert (one == other) == (number in longest)


def test_evaluation_reads_texts_as_they_are(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    first = FillInTheMiddle.of(FimSection(), tokenizer).ids[0]
    for options in ({"evaluation_path": str(path)}, {"evaluation_fraction": 0.3}):
        data = DataSection(
            path=str(path), documents="pad", sequence_length=64, fim={"rate": 1.0}, **options
        )
        opened = open_data(data, tokenizer, tmp_path / "cache", ALONE)
        held_out = opened.evaluations[""]
        assert len(held_out) > 20
        assert all(held_out[n]["input_ids"][0] != first for n in range(len(held_out)))
        assert all(opened.train[n]["input_ids"][0] == first for n in range(len(opened.train)))


@pytest.mark.parametrize("names", NAMES)
def test_each_family_s_tokens_are_found(names: tuple[str, str, str], tokenizer: Any) -> None:
    import copy

    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": list(names)})
    fim = FillInTheMiddle.of(FimSection(tokens=list(names)), other)
    assert tuple(other.convert_ids_to_tokens(list(fim.ids))) == names


def test_what_it_can_not_do_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with raises(ConfigError, "trainer.data.fim", "<a>"):
        FillInTheMiddle.of(FimSection(tokens=["<a>", "<b>", "<fim_middle>"]), tokenizer)
    rows = tmp_path / "chats.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    data = DataSection(path=str(rows), fim={}, documents="pad", evaluation_fraction=0.0)
    with raises(DataError, "chats.jsonl:1", "plain texts"):
        prepare(data, tokenizer, tmp_path / "cache")
