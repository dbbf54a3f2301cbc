"""What a plug-in's recipe brings: figures of its own are logged, and its mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.plugins import command


def config(task: str, **trainer: Any) -> dict[str, Any]:
    section = {"plugins": ["faulty"], "task": task, "device": "cpu", "steps": 2}
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "trainer": section | {"run": {"folder": "runs"}, "log": {"every": 1}} | trainer,
    }


def test_a_measure_of_its_own_is_a_metric(tmp_path: Path) -> None:
    """It used to end the run in the first evaluation, before the save."""
    found = command(tmp_path, config("faulty:measuring"), "train", "--processes", "1")
    assert found.returncode == 0, found.stdout + found.stderr
    rows = (tmp_path / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(row).get("evaluation_ordered") for row in rows]
    assert [value for value in values if value is not None] == [0.5]


@pytest.mark.parametrize(
    ("task", "verb", "words"),
    [
        ("faulty:taken", "train", ("trainer.task", '"targets"', "no other value")),
        ("faulty:measuring", "verify", ("trainer.task", "0 tops", "ordered")),
    ],
)
def test_its_mistake_is_named_at_the_start(
    task: str, verb: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    one = "--processes" if verb == "train" else "--world-size"
    found = command(tmp_path, config(task), verb, one, "1")
    shown = found.stdout + found.stderr
    assert found.returncode == 64, shown
    for word in words:
        assert word in shown
    assert "Traceback" not in shown
