"""A checkpoint that an earlier version wrote resumes: files, names and meaning are kept.

`earlier_checkpoint/` is the second step of four of `job.json` on two processes, by the version
before the rooms of `trainer/` were made; `metrics.jsonl` is what that version found in all four.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import metrics, train
from trainer.data.order import LISTED

EARLIER = Path(__file__).with_name("earlier_checkpoint")


@pytest.mark.first("another engine and size")
@pytest.mark.parametrize(
    "layout",
    [
        ["--processes", "2"],
        ["--processes", "1", "trainer.engine=deepspeed", "zero_optimization.stage=3"],
    ],
    ids=["its own layout", "another engine and size"],
)
def test_an_earlier_checkpoint_goes_on(tmp_path, layout):
    here = tmp_path / "earlier"
    shutil.copytree(EARLIER, here)
    checkpoint = here / "step-000002"
    keys = {
        "data.path": here / "text.jsonl",
        "data.tokenizer": checkpoint / "model",
        "run.folder": tmp_path / "runs",
    }
    overrides = [f"trainer.{key}={value}" for key, value in keys.items()]
    result = train("--config", here / "job.json", "--resume", checkpoint, *layout, *overrides)
    assert result.code == 0, result.output
    wanted = [json.loads(line) for line in (here / "metrics.jsonl").read_text().splitlines()][2:]
    order = json.loads((tmp_path / "runs/job/checkpoints/step-000004/trainer.json").read_text())
    assert order["order"] == LISTED  # and so does what goes on from there
    for results, line in zip(metrics(tmp_path / "runs" / "job"), wanted, strict=True):
        name = "evaluation_loss" if "evaluation_loss" in line else "loss"
        assert (results["step"], results[name]) == (
            line["step"],
            pytest.approx(line[name], rel=1e-5),
        )
