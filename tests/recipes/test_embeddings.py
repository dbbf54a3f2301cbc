"""Embeddings from the command to the folder; the loss over ranks; rows that are no pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.embeddings import LENGTH, WORDS, bert_folder, write_texts
from tests.support.messages import shows
from tests.support.plugins import command
from tests.support.pool import Pools
from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.config.sections.trainer import TrainerSection
from trainer.data.sources.formats import Row
from trainer.errors import ConfigError, DataError
from trainer.models.language import model_config
from trainer.models.language.model_config import state_vocabulary
from trainer.recipes.embeddings.body import (
    body_of,
    check_padding,
    task_of,
    tried_body,
)
from trainer.recipes.embeddings.columns import Columns, check_columns
from trainer.recipes.embeddings.contrast import Contrast, Vectors
from trainer.recipes.embeddings.task import EmbeddingTask
from trainer.tasks.task import Batch


def vectors_of(count: int) -> Vectors:
    """Draw vectors of triplets, some of whose texts are equal."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(count, 3, 5, generator=generator, dtype=torch.float64)
    texts = torch.randint(9, (count, 3), generator=generator)
    return Vectors(vectors, texts, torch.ones(count, dtype=torch.bool))


def of_this_rank(symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs on each rank: losses and gradients of its share of the samples."""
    every = vectors_of(6)
    own = Vectors(*(part.chunk(dist.get_world_size())[dist.get_rank()] for part in every))
    group = dist.group.WORLD
    losses, gradient = Contrast(symmetric=symmetric).gradients(own, group)
    return losses, gradient


@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "both ways"])
def test_the_loss_over_ranks_is_that_of_one(symmetric: bool, pools: Pools) -> None:
    parts = pools[2].run(of_this_rank, symmetric=symmetric)
    losses, gradients = Contrast(symmetric=symmetric).gradients(vectors_of(6), None)
    assert torch.allclose(torch.cat([part[0] for part in parts]), losses, rtol=1e-12)
    assert torch.allclose(torch.cat([part[1] for part in parts]), gradients, rtol=1e-10)


def test_chunks_of_anchors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Contrast(symmetric=True).gradients(vectors_of(7), None)
    monkeypatch.setattr("trainer.recipes.embeddings.contrast.BYTES", 2 * 4 * 14)
    parts = Contrast(symmetric=True).gradients(vectors_of(7), None)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


def test_right_answers_of_others_are_no_negatives() -> None:
    """With them, the loss of these anchors would not be 0."""
    same = torch.ones(2, 2, 3)
    kept = torch.tensor([True, True])
    equal_positives = Vectors(same, torch.tensor([[1, 5], [2, 5]]), kept)
    equal_anchors = Vectors(same, torch.tensor([[1, 5], [1, 6]]), kept)
    anchor_as_positive = Vectors(same, torch.tensor([[1, 5], [5, 1]]), kept)
    for every in (equal_positives, equal_anchors, anchor_as_positive):
        assert float(Contrast(symmetric=True).losses(every, slice(None)).abs().max()) < 1e-6
        unmasked = Contrast(masks=False).losses(every, slice(None))
        assert torch.allclose(unmasked, torch.tensor(2.0).log().expand(2))


def test_places_count_equal_scores_as_nearer() -> None:
    vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]]])
    every = Vectors(vectors, torch.arange(4).reshape(2, 2), torch.tensor([True, True]))
    assert Contrast().ranks(every, slice(None)).tolist() == [1, 1]
    tied = Vectors(torch.ones(2, 2, 2), every.texts, every.real)
    assert Contrast().ranks(tied, slice(None)).tolist() == [2, 2]
    blank = tied._replace(real=torch.tensor([True, False]))
    assert Contrast().ranks(blank, slice(0, 1)).tolist() == [1]


ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pair": ({"query": "a", "answer": "b"}, ["a", "b"]),
    "triplet": ({"negative": "c", "anchor": "a", "positive": "b"}, ["a", "b", "c"]),
    "numbered": (
        {"anchor": "a", "positive": "b", "negative_10": "e", "negative_2": "d"},
        ["a", "b", "d", "e"],
    ),
    "list": ({"query": "a", "pos": ["b"], "neg": ["c", "d"]}, ["a", "b", "c", "d"]),
}


@pytest.mark.parametrize(("columns", "texts"), ROWS.values(), ids=ROWS.keys())
def test_texts_are_found_by_their_columns(columns: dict[str, Any], texts: list[str]) -> None:
    row = Row("file:1", columns)
    assert Columns.of(row, EmbeddingsSection()).texts(row, None) == texts
    assert Columns.of(row, EmbeddingsSection()).texts(row, 1) == texts[:3]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no positive": ({"anchor": "a", "b": "c"}, "positive"),
    "two anchors": ({"anchor": "a", "query": "b", "positive": "c"}, "anchor and query"),
    "empty": ({"anchor": "a", "positive": " "}, "positive"),
    "number": ({"anchor": "a", "positive": 3}, "positive"),
    "two positives": ({"anchor": "a", "pos": ["b", "c"]}, "2 texts"),
}


@pytest.mark.parametrize(("columns", "word"), WRONG.values(), ids=WRONG.keys())
def test_a_row_that_is_no_pair_is_named(columns: dict[str, Any], word: str) -> None:
    row = Row("file:7", columns)
    with pytest.raises(DataError) as caught:
        Columns.of(row, EmbeddingsSection()).texts(row, None)
    assert caught.value.problems[0].place == "file:7"
    assert word in str(caught.value)


def test_columns_are_named_once_and_two_at_least() -> None:
    for names in (["a"], ["a", "b", "a"]):
        with pytest.raises(DataError):
            check_columns(EmbeddingsSection(columns=names))
    row = Row("file:1", {"b": "x", "a": "y"})
    assert Columns.of(row, EmbeddingsSection(columns=["a", "b"])).texts(row, None) == ["y", "x"]


class Unmasked(EmbeddingTask):
    """The planted fault: padding is attended to."""

    def collate(self, samples: Any) -> Batch:
        batch = super().collate(samples)
        return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


def test_a_body_that_looks_at_padding_is_refused() -> None:
    section = TrainerSection.model_validate(
        {"task": "embeddings", "model": {"config": {"model_type": "bert", "vocab_size": 80}}}
    )
    spec = body_of(model_config.read_config(section.model), section)
    task = task_of(section, spec, None)
    check_padding(tried_body(spec, task), task)
    planted = Unmasked(task._reading, task._contrast)
    with pytest.raises(ConfigError) as caught:
        check_padding(tried_body(spec, planted), planted)
    assert "padding" in str(caught.value)


def config(folder: Path, **embeddings: Any) -> dict[str, Any]:
    base = bert_folder(folder / "bert")
    section: dict[str, Any] = {
        "task": "embeddings",
        "device": "cpu",
        "engine": "mesh",
        "steps": 3,
        "model": {"name_or_path": str(base)},
        "data": {
            "path": str(write_texts(folder / "pairs.jsonl", 40, negatives=1)),
            "sequence_length": LENGTH,
            "evaluation_fraction": 0.2,
        },
        "embeddings": embeddings,
        "log": {"every": 1},
        "run": {"folder": "runs"},
    }
    return {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "trainer": section,
    }


@pytest.mark.more
def test_a_run_is_the_same_however_its_step_is_divided_and_opens_elsewhere(tmp_path: Path) -> None:
    """By sentence-transformers, with the prompts of its training, and the same vectors."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    prompts = {"query": "w1 w2 ", "document": "w3 "}
    given = config(tmp_path, prompts=prompts, include_prompt=False, normalize=True)
    rows = []
    for processes, accumulation in ((1, 1), (2, 2)):
        more = given | {"gradient_accumulation_steps": accumulation}
        words = ("train", "--fresh", "--processes", str(processes))
        result = command(tmp_path, more, *words)
        assert result.returncode == 0, result.stdout + result.stderr
        lines = (tmp_path / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    for one, other in zip(*rows, strict=True):
        for key in ("loss", "gradient_norm", "evaluation_loss", "evaluation_mrr"):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=1e-5), key
    final = tmp_path / "runs" / "job" / "final"
    opened = SentenceTransformer(str(final), device="cpu")
    theirs = opened.encode_query(["w5 w6 w7", "w9"])
    body, tokenizer = AutoModel.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    for text, vector in zip(["w5 w6 w7", "w9"], theirs, strict=True):
        ids = tokenizer("w1 w2 " + text, return_tensors="pt")
        with torch.no_grad():
            hidden = body(**ids).last_hidden_state[0, 3:]  # behind [CLS] and the prompt
        mean = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        assert np.allclose(mean.numpy(), vector, atol=1e-6)
    assert opened.prompts == prompts
    assert opened.max_seq_length == LENGTH


@pytest.mark.more
def test_a_new_body_has_the_vocabulary_of_its_tokenizer(tmp_path: Path) -> None:
    """So has its plan; a stated one stays, and one that is too small is refused."""
    given = config(tmp_path)
    section = given["trainer"]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    section["model"] = {"config": {"model_type": "bert", "intermediate_size": 24, **sizes}}
    section["data"]["tokenizer"] = str(tmp_path / "bert")
    section |= {"steps": 1, "plan": "warn"}
    result = command(tmp_path, given, "train", "--processes", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    final = json.loads((tmp_path / "runs" / "job" / "final" / "config.json").read_text())
    assert final["vocab_size"] == WORDS + 4
    section["model"]["config"]["vocab_size"] = 10
    result = command(tmp_path, given, "train", "--processes", "1", "--fresh")
    assert result.returncode == 64, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "vocab_size", "64")


@pytest.mark.parametrize("stated", [None, {"model_type": "bert"}, {"vocab_size": 90}])
def test_a_plan_has_the_vocabulary_of_the_run(stated: dict[str, Any] | None) -> None:
    model: dict[str, Any] = {"name_or_path": None, "config": stated}
    state_vocabulary(model, 64)
    assert model["config"]["vocab_size"] == (stated or {}).get("vocab_size", 64)
    named = {"name_or_path": "base", "config": None}
    state_vocabulary(named, 64)
    assert named["config"] is None
