"""The protocol of a recipe has room for what comes next: sketches of it are certified.

Each is a recipe in `tests/support/plugin/sketches`, and trains as one process of plain PyTorch does.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.plugins import command

ZERO3 = {"zero_optimization": {"stage": 3}}
PIPELINE = {"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}}
HSDP = ZERO3 | {"trainer": {"mesh": {"replicate": 2, "shard": 2}}}


def run(
    folder: Path, sketch: str, layout: dict[str, Any], *words: str
) -> subprocess.CompletedProcess[str]:
    section = {
        "plugins": ["sketches"],
        "task": f"sketch:{sketch}",
        "device": "cpu",
        "steps": 6,
        "log": {"every": 1},
        "run": {"folder": "runs"},
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **layout,
    }
    config["trainer"] = section | layout.get("trainer", {})
    return command(folder, config, *words)


@pytest.mark.more
@pytest.mark.parametrize("layout", [ZERO3, PIPELINE], ids=["zero3", "pipeline_zero2"])
@pytest.mark.parametrize("sketch", ["pair", "head", "image"])
def test_a_sketch_is_certified(sketch: str, layout: dict[str, Any], tmp_path: Path) -> None:
    result = run(tmp_path, sketch, layout, "verify")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.more
@pytest.mark.parametrize("layout", [ZERO3, HSDP, PIPELINE], ids=["zero3", "hsdp", "pipeline_zero2"])
def test_a_loss_over_all_data_ranks_is_certified(layout: dict[str, Any], tmp_path: Path) -> None:
    result = run(tmp_path, "contrast", layout, "verify")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.more
def test_a_loss_of_each_rank_alone_would_be_another(tmp_path: Path) -> None:
    """The planted fault: a contrastive loss that never gathers."""
    result = run(tmp_path, "contrast_alone", ZERO3, "verify")
    assert result.returncode == 76
    assert "FAIL" in result.stdout


@pytest.mark.more
@pytest.mark.parametrize(
    ("layout", "processes"), [(ZERO3, "2"), (PIPELINE, "4")], ids=["zero3", "pipeline_zero2"]
)
def test_a_column_is_computed_before_training(
    layout: dict[str, Any], processes: str, tmp_path: Path
) -> None:
    """By the layout itself, and once: a resumed run, whose weights have changed, reads it."""
    result = run(tmp_path, "column", layout, "train", "--processes", processes)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "runs" / "job"
    column = (folder / "reference.json").read_text()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    # each score is the reference's own at first: -log sigmoid(0)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < losses[0]
    scores = json.loads(column)
    assert len(set(scores)) > len(scores) // 2
    more = layout | {"trainer": {"steps": 8}}
    words = ("train", "--processes", processes, "--resume", "auto")
    result = run(tmp_path, "column", more, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (folder / "reference.json").read_text() == column
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if row.get("step") == 8][0] < losses[-1]
