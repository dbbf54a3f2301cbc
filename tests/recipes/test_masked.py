"""Masked language models: masks by transformers' rule, its loss, and runs from JSON to `final/`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.labels import content, rows_of
from tests.support.masked import masked_base, masked_content, texts_of
from tests.support.messages import shows
from tests.support.plugins import command
from trainer.recipes.masked_lm.masking import HELD_OUT, Masked, MaskRule, WholeTexts

RULE = MaskRule(0.15, 0.8, 0.1, 4, 90, frozenset((0, 4)))


class _Tokenizer(SimpleNamespace):
    def __len__(self) -> int:
        return 90


@pytest.mark.parametrize(("masked", "other"), [(0.8, 0.1), (1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])
def test_masks_are_those_of_transformers_draw_by_draw(masked: float, other: float) -> None:
    from transformers import DataCollatorForLanguageModeling

    rule = MaskRule(0.15, masked, other, 4, 90, frozenset((0, 4)))
    names: Any = _Tokenizer(mask_token="[MASK]", mask_token_id=4)
    shares = {"mask_replace_prob": masked, "random_replace_prob": other}
    collator = DataCollatorForLanguageModeling(names, return_tensors="np", **shares)
    for seed in range(20):
        tokens = np.random.default_rng(seed).integers(0, 90, 200).astype(np.int32)
        special = np.isin(tokens, (0, 4))[None]
        collator.generator = np.random.default_rng(seed + 1)
        theirs = collator.numpy_mask_tokens(tokens[None].astype(np.int64), special)
        ours = rule.apply(tokens, np.random.default_rng(seed + 1))
        for own, reference in zip(ours, theirs, strict=True):
            assert (own == reference[0]).all()


def test_a_mask_is_a_function_of_seed_sample_and_epoch() -> None:
    tokens = [{"input_ids": np.arange(5, 65)} for _ in range(3)]
    source = Masked(tokens, RULE, 7)
    again = Masked(tokens, RULE, 7)
    actual = [source.in_epoch(number, epoch) for number in (0, 1) for epoch in (0, 1)]
    actual += [source[0], Masked(tokens, RULE, 8).in_epoch(0, 0)]
    targets = {tuple(sample["labels"].tolist()) for sample in actual}
    assert len(targets) == len(actual)
    assert (again.in_epoch(1, 1)["labels"] == actual[3]["labels"]).all()
    assert (again.in_epoch(0, HELD_OUT)["labels"] == source[0]["labels"]).all()
    for sample in actual:  # what is no target stands as it was
        rest = sample["labels"] < 0
        assert (sample["input_ids"][rest] == np.arange(5, 65)[rest]).all()


def test_a_sample_has_a_target_unless_all_its_tokens_are_special() -> None:
    short = Masked([{"input_ids": np.array([0, 9, 0])}, {"input_ids": np.array([0, 4])}], RULE, 0)
    for epoch in range(30):
        assert short.in_epoch(0, epoch)["labels"].tolist() == [-100, 9, -100]
    assert (short[1]["labels"] == -100).all()


def test_a_text_is_whole_and_a_cut_one_ends_as_the_tokenizer_ends_it() -> None:
    rows = [
        {"input_ids": np.array([2, 7]), "targets": np.array([7, 3])},
        {"input_ids": np.array([2, 7, 8]), "targets": np.array([7, 8, 9])},
    ]
    whole = WholeTexts(rows, 4, 3)
    assert [whole[number]["input_ids"].tolist() for number in range(2)] == [[2, 7, 3], [2, 7, 8, 3]]


def test_shares_above_one_are_refused(tmp_path: Path) -> None:
    requested = masked_content("bert", masked={"masked": 0.8, "random": 0.3})
    result = command(tmp_path, requested, "train", "--processes", "1")
    assert result.returncode == 64
    shows(result.stderr, "trainer.masked", "at most 1")


WRONG: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "packing": ({"data": {"documents": "pack"}}, 64, ("trainer.data.documents", "both sides")),
    "noise": ({"neftune_alpha": 5.0}, 64, ("trainer.neftune_alpha",)),
    "a causal model": ({"model": {"config": {"model_type": "llama"}}}, 64, ("MaskedLM",)),
    "the default": ({"model": {}}, 64, ("trainer.model",)),
    "no mask token": ({"data": {"tokenizer": "plain"}}, 65, ("mask_token",)),
}
"""Keys, an exit code, and words of the error."""


@pytest.mark.more
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    from tests.support.labels import tokenizer_of

    keys, code, words = WRONG[name]
    keys = dict(keys)
    tokenizer_of(eos_token="[SEP]").save_pretrained(tmp_path / "plain")
    lines = "".join(json.dumps(row) + "\n" for row in texts_of(30))
    (tmp_path / "rows.jsonl").write_text(lines)
    if name == "noise":
        keys["model"] = {"name_or_path": masked_base(tmp_path, "bert")}
    requested = masked_content("bert", **keys)
    requested["trainer"]["data"] = {"path": "rows.jsonl", "sequence_length": 16} | keys.get(
        "data", {}
    )
    result = command(tmp_path, requested, "train", "--processes", "1")
    assert result.returncode == code, result.stdout + result.stderr
    shows(result.stdout + result.stderr, *words)


def trained(folder: Path, body: str, documents: str, layout: str, **trainer: Any) -> list[Any]:
    """Train on 96 texts on 2 processes, and return the rows of its log."""
    for name, count in (("rows", 96), ("held_out", 20)):
        lines = "".join(json.dumps(row) + "\n" for row in texts_of(count))
        (folder / f"{name}.jsonl").write_text(lines)
    base = {"model": {"name_or_path": masked_base(folder, body)}, "steps": 12}
    requested = masked_content(body, layout, **(base | trainer))
    data = {"path": "rows.jsonl", "evaluation_path": "held_out.jsonl", "documents": documents}
    requested["trainer"]["data"] = data | {"sequence_length": 20}
    requested["optimizer"]["params"]["lr"] = 1e-2
    result = command(folder, requested, "train", "--processes", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (folder / "runs" / "job" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in lines.splitlines()]


def held_out_by_transformers(folder: Path, model: Any, documents: str) -> float:
    """Compute the mean loss of the held-out texts by transformers alone, on the run's masks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["text"] for row in texts_of(20)]
    cut = {"truncation": True, "max_length": 20}
    options: dict[str, Any] = {} if documents == "concatenate" else cut
    rows = tokenizer(texts, **options)["input_ids"]
    if documents == "concatenate":  # as group_texts of transformers' own example
        stream = [token for row in rows for token in row]
        rows = [stream[at : at + 20] for at in range(0, len(stream) - 20, 20)]
    ids = tokenizer.mask_token_id, len(tokenizer)
    rule = MaskRule(0.3, 0.8, 0.1, *ids, frozenset(tokenizer.all_special_ids))
    source = Masked([{"input_ids": np.array(row)} for row in rows], rule, 0)
    total = 0.0
    counted = 0
    for number in range(len(rows)):
        sample = source[number]
        labels = torch.tensor(sample["labels"])[None]
        loss = model(input_ids=torch.tensor(sample["input_ids"])[None], labels=labels).loss
        total += float(loss) * int((labels >= 0).sum())
        counted += int((labels >= 0).sum())
    return total / counted


RUNS = [
    ("bert", "concatenate", "zero3"),
    ("modernbert", "pad", "pipeline_zero2"),
    ("roberta", "pad", "fsdp"),
    ("deberta-v2", "concatenate", "ddp"),
]
"""A body, an arrangement of documents, and a layout."""


@pytest.mark.more
@pytest.mark.parametrize(("body", "documents", "layout"), RUNS)
def test_a_run_ends_in_a_folder_whose_loss_transformers_repeats(
    body: str, documents: str, layout: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    log = trained(tmp_path, body, documents, layout)
    [row] = [row for row in log if "evaluation_loss" in row]
    assert row["evaluation_perplexity"] == pytest.approx(math.exp(row["evaluation_loss"]))
    losses = [row["loss"] for row in log if "loss" in row]
    assert min(losses[1:]) < losses[0]
    folder = tmp_path / "runs" / "job" / "final"
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        loss = held_out_by_transformers(folder, model, documents)
    assert loss == pytest.approx(row["evaluation_loss"], rel=1e-5)


@pytest.mark.more
def test_continued_pretraining_then_a_classifier(tmp_path: Path) -> None:
    """A body goes in without a head, comes out with one for masks, and gets one for labels."""
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

    base = masked_base(tmp_path, "bert", "AutoModel")
    lines = "".join(json.dumps(row) + "\n" for row in texts_of(96))
    (tmp_path / "rows.jsonl").write_text(lines)
    requested = masked_content("bert", "zero2", model={"name_or_path": base}, steps=4)
    result = command(tmp_path, requested, "train", "--processes", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "begin at random" in result.stdout
    final = tmp_path / "runs" / "job" / "final"
    pretrained = AutoModelForMaskedLM.from_pretrained(final)
    lines = "".join(json.dumps(row) + "\n" for row in rows_of("single", 96))
    (tmp_path / "rows.jsonl").write_text(lines)
    requested = content("bert", "single", "zero2", model={"name_or_path": str(final)}, steps=1)
    requested["trainer"]["run"] = {"folder": "second"}
    requested["optimizer"]["params"] = {"lr": 1e-30, "weight_decay": 0.0}
    result = command(tmp_path, requested, "train", "--processes", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "classifier.weight" in result.stdout
    folder = tmp_path / "second" / "job" / "final"
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    assert set(classifier.config.label2id) == {"more", "less"}
    ours = dict(pretrained.base_model.named_parameters())
    theirs = dict(classifier.base_model.named_parameters())
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.more
def test_it_is_planned(tmp_path: Path) -> None:
    requested = masked_content("modernbert", "zero2")
    words = ("plan", "--gpus", "2", "--device", "a100-40gb", "--json")
    result = command(tmp_path, requested, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["fits"]
