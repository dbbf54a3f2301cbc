"""Distillation from the user's command: layouts alike, the teacher's column, its refusals."""

from __future__ import annotations

import json
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
LOSS = {"top_k": 8, "hard_weight": 0.2, "temperature": 2.0, "divergence": "jensen_shannon"}
MODEL = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def teacher_in(folder: Path, vocabulary: int = 300, rows: int | None = None) -> str:
    """Save a teacher with a tokenizer of so many tokens, and a head of so many rows."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from trainer.data.text.tokenizer import embedded_tokenizer
    from trainer.supervise.process import cache_folder

    tokenizer = embedded_tokenizer(cache_folder(), vocabulary)
    sizes = MODEL | {"hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.3}
    sizes = {name: size for name, size in sizes.items() if name != "model_type"}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=rows or vocabulary))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return teacher_in(tmp_path_factory.mktemp("teacher"))


def rows(folder: Path) -> str:
    """Write prompts and completions of unequal lengths, some of which are cut."""
    rng = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    lines = []
    for _ in range(60):
        row = {"prompt": f"{text(2, 6)}? ", "completion": text(1, 12)}
        lines.append(json.dumps(row) + "\n")
    (folder / "documents.jsonl").write_text("".join(lines))
    return "documents.jsonl"


def config(
    folder: Path, named: str, /, more: dict[str, Any] | None = None, **distillation: Any
) -> dict[str, Any]:
    more = more or {}
    data = {"path": rows(folder), "sequence_length": 24, "evaluation_fraction": 0.1}
    section = {
        "task": "distillation",
        "device": "cpu",
        "steps": 3,
        "model": {"config": MODEL | {"vocab_size": 300}},
        "data": data | {"tokenizer": named, "documents": "pad"},
        "distillation": LOSS | {"teacher": {"name_or_path": named}} | distillation,
        "log": {"every": 1},
        "run": {"folder": "runs"},
    }
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **more,
        "trainer": section | more.get("trainer", {}),
    }


def train(
    folder: Path, asked: dict[str, Any], *words: str, processes: int = 1
) -> subprocess.CompletedProcess[str]:
    return command(folder, asked, "train", "--processes", str(processes), *words)


def logged(folder: Path) -> list[dict[str, float]]:
    text = (folder / "runs" / "job" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a column by name."""
    known = json.loads((folder / f"{folder.name}.json").read_text())
    return {name: np.load(folder / file) for name, file in known["files"].items()}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, teacher: str) -> Path:
    folder = tmp_path_factory.mktemp("one")
    result = train(folder, config(folder, teacher))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_logs_what_one_process_does(
    layout: str, tmp_path: Path, one_process: Path, teacher: str
) -> None:
    processes, more = LAYOUTS[layout]
    result = train(tmp_path, config(tmp_path, teacher, more), processes=processes)
    assert result.returncode == 0, result.stdout + result.stderr
    expected_arrays = arrays(one_process / "runs" / "job" / "teacher")
    for name, actual in arrays(tmp_path / "runs" / "job" / "teacher").items():
        assert np.allclose(actual, expected_arrays[name], atol=1e-4), name
    expected = logged(one_process)
    own = logged(tmp_path)
    assert len(own) == len(expected)
    for row, of_one in zip(own, expected, strict=True):
        for name in of_one:
            if name in ("hard_loss", "divergence", "teacher_mass") or name.endswith(
                ("loss", "norm")
            ):
                assert row[name] == pytest.approx(of_one[name], rel=1e-4, abs=1e-5), name


@pytest.mark.more
def test_a_column_is_made_once_and_a_damaged_one_is_refused(tmp_path: Path, teacher: str) -> None:
    requested = config(tmp_path, teacher)
    result = train(tmp_path, requested)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "runs" / "job" / "teacher"
    before = (folder / "seal.json").read_bytes()
    requested["trainer"]["steps"] = 4
    result = train(tmp_path, requested, "--resume", "auto")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (folder / "seal.json").read_bytes() == before
    path = folder / "1.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    requested["trainer"]["steps"] = 5
    result = train(tmp_path, requested, "--resume", "auto")
    assert result.returncode == 65
    shows(result.stdout + result.stderr, "teacher", "bytes")


@pytest.mark.more
def test_a_column_of_another_job_is_taken(tmp_path: Path, one_process: Path, teacher: str) -> None:
    """It is made under another layout, and trained from without the teacher."""
    shared = {"column": str(tmp_path / "shared" / "column")}
    sharded = {"zero_optimization": {"stage": 3}, "trainer": {"engine": "mesh"}}
    requested = config(tmp_path, teacher, sharded, **shared)
    result = train(tmp_path, requested, "--teacher-only", processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (tmp_path / "runs").exists()
    result = train(tmp_path, requested, "--teacher-only", processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    shows(result.stdout, "there already")
    requested = config(tmp_path, teacher, **shared)
    requested["trainer"]["distillation"]["teacher"] = {}
    result = train(tmp_path, requested)
    assert result.returncode == 0, result.stdout + result.stderr
    shows(result.stdout, teacher, "float32")
    for row, of_one in zip(logged(tmp_path), logged(one_process), strict=True):
        if "divergence" in of_one:
            assert row["divergence"] == pytest.approx(of_one["divergence"], rel=1e-4)
    for key, value in {"top_k": 9, "temperature": 1.0}.items():
        result = train(tmp_path, config(tmp_path, teacher, **shared, **{key: value}), "--fresh")
        assert result.returncode == 65, result.stdout + result.stderr
        shows(result.stdout + result.stderr, key, str(value))


@pytest.mark.more
def test_a_column_of_another_teacher_or_tokenizer_is_refused(tmp_path: Path, teacher: str) -> None:
    requested = config(tmp_path, teacher, column="column")
    result = train(tmp_path, requested, "--teacher-only")
    assert result.returncode == 0, result.stdout + result.stderr
    other = teacher_in(tmp_path / "other", rows=310)
    requested = config(tmp_path, other, column="column")
    result = train(tmp_path, requested)
    assert result.returncode == 65, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "weights")
    described = tmp_path / "column" / "column.json"
    known = json.loads(described.read_text())
    assert known["data"].keys() == {"train", "evaluation"}
    shutil.rmtree(tmp_path / "column")
    from trainer.data import columns

    columns.write(tmp_path / "column", known | {"tokenizer": "0" * 64}, [("a", np.zeros(1))])
    result = train(tmp_path, config(tmp_path, teacher, column="column"), "--fresh")
    assert result.returncode == 65, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "tokenizer")


@pytest.mark.more
def test_a_teacher_with_a_padded_head_teaches(tmp_path: Path) -> None:
    """Its further ids belong to any other token; they are never among the likeliest."""
    padded = teacher_in(tmp_path / "padded", rows=320)
    result = train(tmp_path, config(tmp_path, padded, top_k=299))
    assert result.returncode == 0, result.stdout + result.stderr
    known = arrays(tmp_path / "runs" / "job" / "teacher")
    assert known["train ids"].max() < 300
    assert logged(tmp_path)[0]["teacher_mass"] < 1


@pytest.mark.more
def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path, teacher: str) -> None:
    requested = config(tmp_path, teacher_in(tmp_path / "other", 280))
    requested["trainer"]["data"]["tokenizer"] = teacher
    result = train(tmp_path, requested, "--dry-run")
    assert result.returncode == 64, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "teacher.name_or_path", "tokens", "280", "300")


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "no teacher": ({"teacher": {}}, {}, ("teacher.name_or_path", "column")),
    "beta": ({"divergence": "forward", "beta": 0.1}, {}, ("distillation.beta",)),
    "too many": ({"top_k": 301}, {}, ("distillation.top_k", "300")),
    "smoothing": ({"hard_weight": 0}, {"label_smoothing": 0.1}, ("label_smoothing", "hard_weight")),
    "stream": ({}, {"data": {"path": "documents.jsonl", "stream": True}}, ("data.stream",)),
    "divergence": ({"divergence": "skew"}, {}, ("distillation.divergence",)),
    "another task": ({}, {"task": "causal_lm"}, ("trainer.distillation",)),
}
"""Keys that do not go together, and the places and words of the error."""


@pytest.mark.more
@pytest.mark.parametrize("name", WRONG)
def test_keys_that_do_not_go_together(name: str, tmp_path: Path, teacher: str) -> None:
    keys, section, words = WRONG[name]
    requested = config(tmp_path, teacher, {"trainer": section}, **keys)
    result = train(tmp_path, requested, "--dry-run")
    assert result.returncode == 64, result.stdout + result.stderr
    shows(result.stdout + result.stderr, *words)


@pytest.mark.more
def test_a_column_that_is_missing_has_no_teacher_to_make_it(tmp_path: Path, teacher: str) -> None:
    requested = config(tmp_path, teacher, column="column")
    requested["trainer"]["distillation"]["teacher"] = {}
    result = train(tmp_path, requested)
    assert result.returncode == 65, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "column", "no folder", "Name the teacher")


@pytest.mark.more
def test_a_teacher_alone_needs_a_folder_and_a_task(tmp_path: Path, teacher: str) -> None:
    result = train(tmp_path, config(tmp_path, teacher), "--teacher-only")
    assert result.returncode == 64, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "trainer.distillation.column")
    result = train(tmp_path, {"train_batch_size": 8}, "--teacher-only")
    assert result.returncode == 64, result.stdout + result.stderr
    shows(result.stdout + result.stderr, "trainer.task", "distillation")
