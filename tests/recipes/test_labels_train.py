"""A run from JSON to `final/`, which transformers and PEFT alone open and score as the run did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.labels import BODIES, base_of, content, rows_of
from tests.support.messages import shows
from tests.support.plugins import command
from trainer.models.opened import opened

AUTO = {"tokens": "AutoModelForTokenClassification"}
RUNS = [
    ("bert", "single", "zero3", "mesh"),
    ("llama", "single", "zero2", "deepspeed"),
    ("modernbert", "tokens", "pipeline_zero2", "mesh"),
    ("deberta-v2", "regression", "fsdp", "accelerate"),
    ("qwen3", "reward", "ddp", "deepspeed"),
    ("bert", "multi", "ddp", "accelerate"),
    ("llama", "reward", "lora", "mesh"),
    ("bert", "tokens", "lora", "mesh"),
]
"""A body, a kind of labels, a layout and an engine."""


def trained(folder: Path, body: str, kind: str, layout: str, engine: str) -> list[dict[str, Any]]:
    """Train on 96 rows on 2 processes; return the rows of its log."""
    for name, count in (("rows", 96), ("held_out", 20)):
        lines = "".join(json.dumps(row) + "\n" for row in rows_of(kind, count))
        (folder / f"{name}.jsonl").write_text(lines)
    requested = content(body, kind, layout, engine=engine, steps=8)
    requested["trainer"]["labels"].pop("kind")
    requested["trainer"]["model"] = {"name_or_path": base_of(folder, body)}
    requested["trainer"]["data"]["evaluation_path"] = "held_out.jsonl"
    requested["optimizer"]["params"]["lr"] = 1e-2
    result = command(folder, requested, "train", "--processes", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (folder / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def loss_by_transformers(folder: Path, model: Any, kind: str) -> float:
    """Compute the loss of the held-out rows by the model and the tokenizer of a folder alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = 0.0
    counted = 0
    for row in rows_of(kind, 20):
        if kind == "reward":
            texts = [row[side] + tokenizer.eos_token for side in ("chosen", "rejected")]
            scores = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts]
            better, worse = (score.squeeze() for score in scores)
            difference = better - worse - row["margin"]
            total += float(-torch.nn.functional.logsigmoid(difference))
            total += 0.01 * float((better + worse) ** 2)
            counted += 1
            continue
        names = model.config.label2id
        words = row["tokens"] if kind == "tokens" else row["text"]
        split = {"is_split_into_words": True} if kind == "tokens" else {}
        inputs = tokenizer(words, return_tensors="pt", **split)
        if kind == "tokens":
            places = inputs.word_ids()
            labels = torch.tensor(
                [[-100 if p is None else names[row["ner_tags"][p]] for p in places]]
            )
            number = len(words)
        elif kind == "multi":
            labels = torch.tensor([[float(name in row["label"]) for name in sorted(names)]])
            number = labels.numel()
        else:
            labels = torch.tensor([names[row["label"]] if kind == "single" else row["label"]])
            number = 1
        total += float(model(**inputs, labels=labels).loss) * number
        counted += number
    return total / counted


@pytest.mark.more
@pytest.mark.parametrize(("body", "kind", "layout", "engine"), RUNS)
def test_a_run_ends_in_a_folder_that_others_open(
    body: str, kind: str, layout: str, engine: str, tmp_path: Path
) -> None:
    import peft
    import transformers

    log = trained(tmp_path, body, kind, layout, engine)
    losses = [row["loss"] for row in log if "loss" in row]
    assert min(losses[1:]) < losses[0]
    [reported] = [row["evaluation_loss"] for row in log if "evaluation_loss" in row]
    folder = tmp_path / "runs" / "job" / "final"
    auto = getattr(transformers, AUTO.get(kind, "AutoModelForSequenceClassification"))
    if layout == "lora":
        config = transformers.AutoConfig.from_pretrained(folder)
        base = auto.from_pretrained(tmp_path / body, config=config)
        model = peft.PeftModel.from_pretrained(base, folder).eval()
    else:
        model = auto.from_pretrained(folder).eval()
    with torch.no_grad():
        assert loss_by_transformers(folder, model, kind) == pytest.approx(reported, rel=1e-5)
        own = opened(folder)
        assert loss_by_transformers(folder, own, kind) == pytest.approx(reported, rel=1e-5)


def test_what_it_does_not_read_is_refused(tmp_path: Path) -> None:
    """By name, before anything is imported: packing first, which no head for labels is made for."""
    requested = content("llama", "single", data={"path": "rows.jsonl", "documents": "pack"})
    requested["trainer"]["evaluation"] = {"tasks": ["piqa"]}
    result = command(tmp_path, requested, "train", "--processes", "1")
    assert result.returncode == 64
    shows(result.stderr, "trainer.data.documents", "trainer.evaluation.tasks")


ROUTED = {"output_router_logits": True, "vocab_size": 5000}
WRONG: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "noise": ("single", {"neftune_alpha": 5.0}, ("trainer.neftune_alpha",)),
    "smoothed numbers": ("regression", {"label_smoothing": 0.1}, ("trainer.label_smoothing",)),
    "centred classes": ("single", {"labels": {"centring": 0.1}}, ("trainer.labels.centring",)),
    "records": (
        "single",
        {"data": {"path": "rows.jsonl", "records": "chat"}},
        ("trainer.data.records",),
    ),
    "columns": (
        "single",
        {"data": {"path": "rows.jsonl", "chosen_column": "a"}},
        ("trainer.data.chosen_column",),
    ),
    "a router": (
        "single",
        {"model": {"config": BODIES["qwen3_moe"] | ROUTED}},
        ("trainer.model", "output_router_logits"),
    ),
    "an encoder with a decoder": (
        "single",
        {"model": {"config": {"model_type": "t5", "num_layers": 2}}},
        ("trainer.model", "decoder"),
    ),
}
"""A kind of labels, keys, and words of the error."""


@pytest.mark.more
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    kind, keys, words = WRONG[name]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows_of(kind, 9)))
    base = {"name_or_path": base_of(tmp_path, "llama")}
    requested = content("llama", kind, **({"model": base} | keys))
    result = command(tmp_path, requested, "train", "--processes", "1")
    assert result.returncode == 64, result.stdout + result.stderr
    shows(result.stdout + result.stderr, *words)


@pytest.mark.more
def test_a_base_that_is_a_classifier_keeps_its_head_and_its_classes(tmp_path: Path) -> None:
    """With other classes it is refused, and with names of one's own its head begins at random."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = Path(base_of(tmp_path, "bert"))
    names = {"id2label": {0: "more", 1: "less"}, "label2id": {"more": 0, "less": 1}}
    config = AutoConfig.for_model(**BODIES["bert"], **names)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    lines = "".join(json.dumps(row) + "\n" for row in rows_of("single", 30))
    (tmp_path / "rows.jsonl").write_text(lines)
    requested = content("bert", "single", model={"name_or_path": str(folder)}, steps=1)
    result = command(tmp_path, requested, "train", "--processes", "1", "--dry-run")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "labels  more, less" in result.stdout
    assert "at random" not in result.stdout
    requested["trainer"]["labels"]["names"] = ["less", "more"]
    result = command(tmp_path, requested, "train", "--processes", "1", "--dry-run")
    assert "labels  less, more" in result.stdout
    assert "classifier.weight" in result.stdout
    requested["trainer"]["labels"].pop("names")
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": "other"}\n' * 9)
    result = command(tmp_path, requested, "train", "--processes", "1", "--dry-run")
    assert result.returncode == 65
    shows(result.stdout + result.stderr, "rows.jsonl:1", "other", "more")


@pytest.mark.more
def test_it_is_planned(tmp_path: Path) -> None:
    requested = content("llama", "reward", "zero2")
    words = ("plan", "--gpus", "2", "--device", "a100-40gb", "--json")
    result = command(tmp_path, requested, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["fits"]
