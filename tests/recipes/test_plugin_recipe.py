"""A whole recipe from a package of its own: it trains, is certified and is planned.

Nothing in `trainer` knows it: an entry point of the group `meshloom.recipes` names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import shows
from tests.support.plugins import command

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_optimization": {"stage": 3}},
    "pipeline_zero2": {"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}},
    "tensor_zero2": {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
}


def config(layout: str, **trainer: Any) -> dict[str, Any]:
    section = {"task": "labelling:tokens", "device": "cpu", "steps": 6, "log": {"every": 1}}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **LAYOUTS[layout],
        "trainer": section | {"run": {"folder": "runs"}} | trainer,
    }


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Lay out what an installer leaves of the package: its entry point."""
    information = tmp_path / "site" / "meshloom_parity-1.0.dist-info"
    information.mkdir(parents=True)
    named = "Metadata-Version: 2.1\nName: meshloom-parity\nVersion: 1.0\n"
    (information / "METADATA").write_text(named)
    points = "[meshloom.recipes]\nlabelling:tokens = labelling:RECIPE\n"
    (information / "entry_points.txt").write_text(points)
    return information.parent


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains(layout: str, tmp_path: Path, installed: Path) -> None:
    requested = config(layout, recipe={"labels": 3})
    result = command(tmp_path, requested, "train", "--processes", "2", beside=installed)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "runs" / "job"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert any("evaluation_accuracy" in row for row in rows)
    assert (folder / "final" / "model.safetensors").is_file()


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_certificate_passes(layout: str, tmp_path: Path, installed: Path) -> None:
    result = command(tmp_path, config(layout), "verify", beside=installed)
    assert result.returncode == 0, result.stdout + result.stderr
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    checks = {finding["check"] for finding in certificate["findings"]}
    assert certificate["passed"]
    assert {"loss", "gradient", "norm", "accuracy", "resumed state"} <= checks


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_planned(layout: str, tmp_path: Path, installed: Path) -> None:
    words = ("plan", "--gpus", "2", "--device", "a100-40gb", "--json")
    result = command(tmp_path, config(layout), *words, beside=installed)
    assert result.returncode == 0, result.stdout + result.stderr
    plan = json.loads(result.stdout)
    assert plan["fits"]
    assert plan["needed"] > 0


WRONG: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "its own keys": (
        {"recipe": {"labels": 1, "colour": "red"}, "data": {"tokenizer": "gpt2"}},
        True,
        ("trainer.recipe.labels", "trainer.recipe.colour", "trainer.data.tokenizer"),
    ),
    "not installed": ({}, False, ("trainer.task", "labelling:tokens")),
    "a recipe that ships": (
        {"recipe": {"labels": 2}, "task": "causal_lm"},
        False,
        ("trainer.recipe",),
    ),
}
"""Keys of the trainer, whether the package is installed, and the places of the error."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys_are_named(tmp_path: Path, request: pytest.FixtureRequest, name: str) -> None:
    section, with_package, places = WRONG[name]
    beside = request.getfixturevalue("installed") if with_package else tmp_path
    requested = config("zero3", **section)
    result = command(tmp_path, requested, "train", beside=beside)
    assert result.returncode == 64
    shows(result.stderr, *places)


def test_a_key_that_it_honours_is_taken(tmp_path: Path, installed: Path) -> None:
    requested = config("zero3", data={"sequence_length": 4})
    result = command(tmp_path, requested, "train", "--dry-run", beside=installed)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.more
def test_it_is_cut_into_stages_whatever_its_sequences(tmp_path: Path, installed: Path) -> None:
    """Its later stages have no table of places: with fewer tokens than samples, reading one's
    weight was seen to fail, and with more it was luck."""
    requested = config("pipeline_zero2", recipe={"length": 2})
    result = command(
        tmp_path, requested, "train", "--dry-run", "--processes", "2", beside=installed
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_its_share_of_held_out_samples_is_the_config_s(tmp_path: Path, installed: Path) -> None:
    requested = config("zero3", recipe={"samples": 40}, data={"evaluation_fraction": 0.5})
    result = command(
        tmp_path, requested, "train", "--dry-run", "--processes", "1", beside=installed
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "20 samples, 20 held out" in result.stdout
