"""Preference optimisation from the user's command: layouts alike, the reference, its refusals."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.messages import shows
from tests.support.plugins import command

WORDS = ("the", "sky", "is", "blue", "and", "green", "trees", "grow", "in", "a", "garden", "tea")
ZERO2 = {"zero_optimization": {"stage": 2}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "fsdp": (2, {"zero_optimization": {"stage": 3}, "trainer": {"engine": "mesh"}}),
    "pipeline_zero2": (2, ZERO2 | {"pipeline": {"stages": 2}}),
    "tensor_zero2": (2, ZERO2 | {"tensor_parallel": {"autotp_size": 2}}),
    "context": (2, ZERO2 | {"sequence_parallel_size": 2}),
}


def rows(folder: Path) -> str:
    """Write pairs of unequal lengths, some of which are cut."""
    rng = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    lines = []
    for _ in range(60):
        row = {"prompt": f"{text(2, 6)}? ", "chosen": text(1, 9), "rejected": text(1, 12)}
        lines.append(json.dumps(row) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    return "pairs.jsonl"


def config(folder: Path, more: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    more = more or {}
    model = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    section = {
        "task": "pairs",
        "device": "cpu",
        "steps": 3,
        "model": {"config": model},
        "data": {"path": rows(folder), "sequence_length": 24, "evaluation_fraction": 0.1},
        "log": {"every": 1},
        "run": {"folder": "runs"},
    }
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **more,
        "trainer": section | more.get("trainer", {}) | trainer,
    }


def train(
    folder: Path, asked: dict[str, Any], *words: str, processes: int = 1
) -> subprocess.CompletedProcess[str]:
    return command(folder, asked, "train", "--processes", str(processes), *words)


def logged(folder: Path) -> list[dict[str, float]]:
    text = (folder / "runs" / "job" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("one")
    result = train(folder, config(folder, pairs={"sft_weight": 0.5}))
    assert result.returncode == 0, result.stdout + result.stderr
    return logged(folder)


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_logs_what_one_process_does(
    layout: str, tmp_path: Path, one_process: list[dict[str, float]]
) -> None:
    processes, more = LAYOUTS[layout]
    requested = config(tmp_path, more, pairs={"sft_weight": 0.5})
    result = train(tmp_path, requested, processes=processes)
    assert result.returncode == 0, result.stdout + result.stderr
    own = logged(tmp_path)
    assert len(own) == len(one_process)
    for row, expected in zip(own, one_process, strict=True):
        for name in expected:
            if "rewards" in name or "logps" in name or name.endswith(("loss", "norm")):
                assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


@pytest.mark.more
def test_the_reference_is_computed_once(tmp_path: Path) -> None:
    requested = config(tmp_path)
    result = train(tmp_path, requested)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "which is ln 2" in result.stdout
    first = logged(tmp_path)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    folder = tmp_path / "runs" / "job" / "reference"
    columns = {path.name: np.load(path) for path in folder.glob("*.npy")}
    assert all(len(np.unique(column)) > len(column) for column in columns.values())
    requested["trainer"]["steps"] = 5
    result = train(tmp_path, requested, "--resume", "auto")
    assert result.returncode == 0, result.stdout + result.stderr
    for name, column in columns.items():
        assert np.array_equal(np.load(folder / name), column)
    requested["trainer"]["steps"] = 6
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)
    _alter(folder)
    result = train(tmp_path, requested, "--resume", "auto")
    assert result.returncode == 65
    shows(result.stdout + result.stderr, "reference", "bytes")
    shutil.rmtree(folder)
    result = train(tmp_path, requested, "--resume", "auto")
    assert result.returncode == 65
    shows(result.stdout + result.stderr, "reference", "no folder")
    other = json.loads((kept / "reference.json").read_text())
    assert set(other["data"]) == {"train", "evaluation"}


def _alter(folder: Path) -> None:
    path = folder / "0.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.more
def test_a_model_whose_evaluation_is_no_function_ends_with_76(tmp_path: Path) -> None:
    """The planted fault: the reference is taken with dropout on."""
    requested = config(tmp_path, plugins=["dropping"])
    requested["trainer"]["model"]["config"]["attention_dropout"] = 0.5
    (tmp_path / "dropping.py").write_text(
        "import trainer.parallel.forward_backward as module\n"
        "def evaluate(self, batches):\n"
        "    import torch\n"
        "    self._module.eval()\n"
        "    for part in self._module.modules():\n"
        "        if hasattr(part, 'attention_dropout'):\n"
        "            part.training = True\n"
        "    with torch.no_grad():\n"
        "        return torch.stack([self._module(batch) for batch in batches]).sum(0)\n"
        "module.GradientAccumulation.evaluate = evaluate\n"
    )
    result = train(tmp_path, requested, "trainer.engine=mesh")
    assert result.returncode == 76, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "first loss", "0.6931472", "evaluation")


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "smoothing": ({"pairs": {"loss": "hinge", "label_smoothing": 0.1}}, ("label_smoothing",)),
    "no smoothing": ({"pairs": {"loss": "exo_pair"}}, ("label_smoothing", "exo_pair")),
    "gamma": ({"pairs": {"gamma": 1.0}}, ("trainer.pairs.gamma", "simpo")),
    "loss": ({"pairs": {"loss": "kto"}}, ("trainer.pairs.loss",)),
    "packed": ({"data": {"path": "pairs.jsonl", "documents": "pack"}}, ("documents", "packed")),
    "records": ({"data": {"path": "pairs.jsonl", "records": "text"}}, ("trainer.data.records",)),
    "stream": (
        {"data": {"path": "pairs.jsonl", "stream": True}},
        ("trainer.data.stream", "simpo"),
    ),
    "tokens": ({"label_smoothing": 0.1}, ("trainer.label_smoothing", "trainer.pairs")),
    "no data": ({"data": {}}, ("trainer.data.path", "chosen")),
    "text": ({"data": {"path": "pairs.jsonl", "text_column": "a"}}, ("trainer.data.text_column",)),
}
"""Keys that do not go together, and the places and words of the error."""


@pytest.mark.more
@pytest.mark.parametrize("name", WRONG)
def test_keys_that_do_not_go_together(name: str, tmp_path: Path) -> None:
    section, words = WRONG[name]
    result = train(tmp_path, config(tmp_path, **section), "--dry-run")
    assert result.returncode == 64, result.stdout + result.stderr
    shows(result.stdout + result.stderr, *words)


@pytest.mark.more
def test_a_margin_that_the_loss_does_not_take(tmp_path: Path) -> None:
    requested = config(tmp_path, pairs={"loss": "ipo"})
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps(json.loads(line) | {"margin": 1}) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    result = train(tmp_path, requested, "--dry-run")
    assert result.returncode == 65, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "margin", "ipo")


@pytest.mark.more
def test_ranked_answers_are_trained_on(tmp_path: Path) -> None:
    requested = config(tmp_path, steps=1)
    rows = [{"prompt": f"{word}? ", "answers": ["the sky", "a tea", "green"]} for word in WORDS]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "pairs.jsonl").write_text(text)
    for ranked, count in (("all", 36), ("best", 24)):
        more = [f"trainer.pairs.ranked={ranked}", "trainer.data.evaluation_fraction=0"]
        result = train(tmp_path, requested, *more, "--preview", "36")
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.count(", chosen: ") == count
    result = train(tmp_path, requested)
    assert result.returncode == 0, result.stdout + result.stderr
    shows(result.stdout, "ranked answers")


@pytest.mark.more
def test_both_answers_are_shown(tmp_path: Path) -> None:
    result = train(tmp_path, config(tmp_path), "--preview", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in (", chosen: ", ", rejected: ", "  + ", "  . "):
        assert word in result.stdout
