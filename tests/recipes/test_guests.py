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
    result = command(tmp_path, config("faulty:measuring"), "train", "--processes", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = (tmp_path / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(row).get("evaluation_ordered") for row in rows]
    assert [value for value in values if value is not None] == [0.5]


@pytest.mark.first("raises")
@pytest.mark.parametrize(
    ("task", "verb", "words"),
    [
        ("faulty:taken", "train", ("trainer.task", '"targets"', "no other value")),
        ("faulty:measuring", "verify", ("trainer.task", "0 tops", "ordered")),
        (
            "faulty:raising",
            "train",
            ("trainer.task", "faulty:raising: KeyError", "own file", "line"),
        ),
        ("faulty:kind", "train", ("trainer.task", "faulty:kind is a class", "subject")),
        ("faulty:unplanned", "plan", ("trainer.task", "faulty:unplanned has no planned")),
        ("faulty:raisin", "train", ("trainer.task", 'Did you mean "faulty:raising"')),
    ],
    ids=["targets", "tops", "raises", "class", "no plan", "name"],
)
def test_its_mistake_is_named_at_the_start(
    task: str, verb: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    one = {"train": "--processes", "verify": "--world-size", "plan": "--gpus"}[verb]
    result = command(tmp_path, config(task), verb, one, "1")
    shown = result.stdout + result.stderr
    assert result.returncode == 64, shown
    for word in words:
        assert word in shown
    assert "Traceback" not in shown


@pytest.mark.more
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
            ("pipeline.stages", "the stage of blocks.", ".py, line", "a module without children"),
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, ("your own module", "tensor_plan=")),
    ],
    ids=["pipeline", "tensor"],
)
def test_an_error_says_what_a_layout_asks_of_its_model(
    layout: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    result = command(tmp_path, config("faulty:sliced") | layout, "train", "--processes", "2")
    shown = result.stdout + result.stderr
    assert result.returncode == 64, shown
    for word in words:
        assert word in shown


@pytest.mark.more
def test_a_key_that_it_does_not_read_is_refused(tmp_path: Path) -> None:
    named = {"model": {"name_or_path": "gpt2"}, "data": {"path": "x", "evaluation_fraction": 0.1}}
    result = command(tmp_path, config("sketch:head", **named), "train", "--processes", "1")
    assert result.returncode == 64, result.stdout + result.stderr
    for key in ("model.name_or_path", "data.path", "data.evaluation_fraction"):
        assert f"trainer.{key}" in result.stdout + result.stderr


@pytest.mark.more
def test_its_frozen_parameters_are_those_of_the_config(tmp_path: Path) -> None:
    """In training and in its plan, though no method of the recipe asks for them."""
    frozen = config("sketch:head", freeze=["score.*"])
    result = command(tmp_path, frozen, "train", "--dry-run", "--processes", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "are frozen (trainer.freeze)" in result.stdout
    wrong = config("sketch:head", freeze=["scores.*"])
    result = command(tmp_path, wrong, "plan", "--gpus", "1")
    assert result.returncode == 64, result.stdout + result.stderr
    assert "trainer.freeze" in result.stdout + result.stderr


@pytest.mark.more
def test_its_rate_is_in_its_own_plural(tmp_path: Path) -> None:
    result = command(
        tmp_path, config("faulty:stories"), "plan", "--gpus", "1", "--device", "h100-80gb"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "stories/s" in result.stdout
