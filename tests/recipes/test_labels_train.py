"""A run from JSON to `final/`, which transformers and PEFT alone open and score as the run did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.labels import base_of, content, rows_of
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
    asked = content(body, kind, layout, engine=engine, steps=8)
    asked["trainer"]["labels"].pop("kind")
    asked["trainer"]["model"] = {"name_or_path": base_of(folder, body)}
    asked["trainer"]["data"]["evaluation_path"] = "held_out.jsonl"
    asked["optimizer"]["params"]["lr"] = 1e-2
    result = command(folder, asked, "train", "--processes", "2")
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
    assert losses[-1] < losses[0]
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
