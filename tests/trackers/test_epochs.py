"""The line at the end of each epoch: the mean loss over its steps, in every engine and layout."""

from __future__ import annotations

import json
import math
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console as Terminal
from torch._subclasses.fake_tensor import FakeTensorMode

import trainer
from tests.support.command.own_module import OWN, ROWS, config
from tests.support.commands import metrics, train, write_job
from tests.support.messages import shows
from trainer.engines.engine import Metrics
from trainer.run.loop import LoopPlan
from trainer.run.observers.metrics import EpochLoss
from trainer.trackers import Console, Epoch, JsonLines, services

LINE = re.compile(r"^Epoch \[(\d+)/(\S+)\], Loss: (\d+\.\d{4})$", re.MULTILINE)
LAYOUTS: dict[str, dict[str, Any]] = {
    "mesh ddp": {"zero_optimization": {"stage": 0}, "trainer": {"engine": "mesh"}},
    "mesh zero3": {"zero_optimization": {"stage": 3}, "trainer": {"engine": "mesh"}},
    "mesh pipeline": {
        "zero_optimization": {"stage": 0},
        "pipeline": {"stages": 2},
        "gradient_accumulation_steps": 2,
        "trainer": {"engine": "mesh"},
    },
    "deepspeed zero2": {"zero_optimization": {"stage": 2}, "trainer": {"engine": "deepspeed"}},
    "accelerate fsdp": {"zero_optimization": {"stage": 3}, "trainer": {"engine": "accelerate"}},
}


def job(folder: Path, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Two epochs of 56 samples in steps of 8, of which every one is logged."""
    made = config(folder, **{"data": {"evaluation_fraction": 0}, "log": {"every": 1}, **more})
    made["trainer"].pop("steps")
    section = made["trainer"] | layout.get("trainer", {})
    return made | layout | {"trainer": {"epochs": 2, **section}}


def epochs_in(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "epoch_loss" in row]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.more) for name in LAYOUTS if name != "mesh ddp"]
    + ["mesh ddp"],
)  # fmt: skip
def test_it_is_the_mean_of_its_steps(tmp_path, capfd, layout):
    given = OWN | {"quiet": False, "data": ROWS[:56]}
    result = trainer.train(job(tmp_path, LAYOUTS[layout]), **given, processes=2)
    assert len(result.losses) == 14
    means = [math.fsum(result.losses[first : first + 7]) / 7 for first in (0, 7)]
    assert [epoch.loss for epoch in result.epochs] == pytest.approx(means, rel=1e-6)
    assert [(epoch.number, epoch.total, epoch.step) for epoch in result.epochs] == [
        (1, 2, 7),
        (2, 2, 14),
    ]
    shown = LINE.findall(capfd.readouterr().out)
    # the first rank alone prints
    assert shown == [(str(n), "2", f"{mean:.4f}") for n, mean in enumerate(means, 1)]
    assert [row["epoch_loss"] for row in epochs_in(result.folder)] == pytest.approx(means)


def test_steps_that_are_not_logged_count(tmp_path):
    every = trainer.train(job(tmp_path / "a", {}), **OWN).epochs
    few = trainer.train(job(tmp_path / "b", {}, log={"every": 100}), **OWN)
    assert len(few.records) == 1 and few.epochs == every and len(every) == 2


class Stops(trainer.Callback):
    def on_step_end(self, step: int) -> bool:
        return step == 11


def test_a_resumed_epoch_has_the_mean_of_all_its_steps(tmp_path):
    """It is stopped in the middle of the second epoch: what was seen of it is in the checkpoint."""
    whole = trainer.train(job(tmp_path / "whole", {}), **OWN)
    trainer.train(job(tmp_path / "cut", {}), **OWN, callbacks=[Stops()])
    resumed = trainer.train(job(tmp_path / "cut", {}), **OWN, resume="auto")
    assert resumed.records[0].step == 12
    assert resumed.epochs == whole.epochs[1:]
    assert epochs_in(resumed.folder) == epochs_in(whole.folder)


def test_a_resume_at_the_end_of_an_epoch_begins_the_next_one_anew(tmp_path):
    class AtItsEnd(trainer.Callback):
        def on_step_end(self, step: int) -> bool:
            return step == 8

    whole = trainer.train(job(tmp_path / "whole", {}), **OWN)
    trainer.train(job(tmp_path / "cut", {}), **OWN, callbacks=[AtItsEnd()])
    assert (
        trainer.train(job(tmp_path / "cut", {}), **OWN, resume="auto").epochs == (whole.epochs[1:])
    )


def test_a_run_in_steps_has_none(tmp_path):
    result = trainer.train(config(tmp_path, 20), **OWN)
    assert result.epochs == () and epochs_in(result.folder) == []


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "expected"),
    [
        (8, 4, 3, {2: 1, 4: 2, 6: 3}),
        (10, 4, 2, {3: 1, 5: 2}),  # a step with samples of two epochs counts for the one it ends
        (3, 8, 1, {1: 1}),
        (3, 8, 4, {1: 2, 2: 4}),  # a step that ends two of them
        (8, 4, 2.5, {2: 1, 4: 2}),
        (8, 4, 0.5, {}),
    ],
)
def test_when_an_epoch_ends(size, batch, epochs, expected):
    plan = LoopPlan(9, batch, 1, None, None, epoch_samples=size, epochs=epochs)
    steps = max(1, math.ceil(epochs * size / batch))
    ends = {step: plan.epoch_ended(step * batch) for step in range(1, steps + 1)}
    assert {step: number for step, number in ends.items() if number} == expected
    assert LoopPlan(9, batch, 1, None, None).epoch_ended(8 * batch) is None


def metrics_of(loss: float, norm: float = 1.0, skipped: bool = False) -> Metrics:
    return Metrics(torch.tensor(4 * loss), torch.tensor(4), torch.tensor(norm), skipped)


def test_a_step_that_changed_nothing_does_not_count():
    mean = EpochLoss()
    for one in (metrics_of(1.0), metrics_of(math.nan, math.inf), metrics_of(9.0, skipped=True)):
        mean.note(one)
    mean.note(metrics_of(2.0))
    assert mean.take() == 1.5
    mean.note(metrics_of(5.0))
    assert mean.take() == 5.0
    mean.note(metrics_of(math.nan, math.nan))
    assert math.isnan(mean.take())


def test_a_step_is_noted_without_waiting_for_the_device():
    """Reading a value of a fake tensor raises an error."""
    mean = EpochLoss()
    with FakeTensorMode():
        for _ in range(2):
            mean.note(metrics_of(1.0))


def test_a_later_sum_over_ranks_does_not_change_what_was_noted():
    """`Metrics.loss()` sums over the ranks in place."""
    mean, step = EpochLoss(), metrics_of(1.0)
    mean.note(step)
    step.loss_sum += 100
    assert mean.take() == 1.0


def test_it_is_logged_as_a_line_and_a_row(tmp_path):
    text, epoch = StringIO(), Epoch(step=600, loss=0.51234, number=1, total=10)
    Console(Terminal(file=text, force_terminal=False)).epoch(epoch)
    Console(Terminal(file=text, force_terminal=False)).epoch(
        Epoch(step=900, loss=math.nan, number=2, total=2.5)
    )
    shows(text.getvalue(), "[1/10]", "0.5123", "Epoch [2/2.5]", "nan")
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.epoch(epoch)
    lines.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"step": 600, "epoch_loss": 0.51234, "epoch_number": 1, "epoch_total": 10}


def test_a_tracker_of_a_plug_in_need_not_know_of_epochs(tmp_path, monkeypatch):
    class Old:
        def __init__(self, folder: Path) -> None: ...

        def record(self, record: Any) -> None: ...

        def close(self) -> None: ...

    class New(Old):
        epochs: list[Epoch] = []

        def epoch(self, epoch: Epoch) -> None:
            self.epochs.append(epoch)

    noted: list[str] = []
    epoch = Epoch(step=1, loss=1.0, number=1, total=1)
    for name, kind in {"a:old": Old, "a:new": New}.items():
        monkeypatch.setitem(services.NAMED["tracker"], name, kind)
        services.Opened(name, tmp_path, noted.append).epoch(epoch)
    assert New.epochs == [epoch] and noted == []


@pytest.mark.more
def test_a_command_shows_it_and_mlflow_keeps_it(tmp_path):
    """A language model whose step ends an epoch in its middle, killed by a signal and resumed."""
    mlflow = pytest.importorskip("mlflow")
    path = write_job(tmp_path, log={"every": 1, "trackers": ["mlflow"]})
    result = train("--config", path, "trainer.epochs=2", "trainer.run.name=a")
    assert result.code == 0, result.output
    rows = metrics(tmp_path / "runs" / "a")
    results = [row for row in rows if "epoch_loss" in row]
    assert [row["epoch_number"] for row in results] == [1, 2]
    assert [
        (number, loss) for number, _, loss in LINE.findall(result.output)
    ] == [(str(row["epoch_number"]), f"{row['epoch_loss']:.4f}") for row in results]  # fmt: skip
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    first, last = (row["step"] for row in results)
    assert last == max(losses)
    own = [losses[step] for step in range(first + 1, last + 1)]
    assert min(own) < results[1]["epoch_loss"] < max(own)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'a' / 'mlflow.db'}")
    [logged] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert logged.data.metrics["epoch_loss"] == pytest.approx(results[1]["epoch_loss"])
    assert logged.data.metrics["epoch_number"] == 2 and "epoch_total" not in logged.data.metrics


def test_an_epoch_goes_on_from_the_sums_of_a_checkpoint():
    mean = EpochLoss({"loss": 12.0, "targets": 4.0})
    assert mean.sums() == {"loss": 12.0, "targets": 4.0}
    mean.note(metrics_of(1.0))
    assert mean.sums() == {"loss": 16.0, "targets": 8.0}
    assert mean.take() == 2.0 and mean.sums() == {"loss": 0.0, "targets": 0.0}
    mean.note(metrics_of(math.nan))
    assert mean.sums() is None
