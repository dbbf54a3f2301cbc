"""Trackers: the console's text, and files that other tools can read."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console as Terminal

from tests.support.messages import raises, shows, shows_each
from trainer import plugins
from trainer.errors import ConfigError, DiskError
from trainer.supervise.output import Signs
from trainer.supervise.stall import Phase
from trainer.trackers import (
    Console,
    Evaluation,
    JsonLines,
    Record,
    Speed,
    open_trackers,
    progress_line,
    services,
)

RECORD = Record(
    step=120,
    total_steps=150,
    samples=3840,
    tokens=983_040,
    loss=3.2141,
    learning_rate=9.1e-4,
    gradient_norm=0.831,
    speed=Speed(
        tokens_per_second=21_400.0,
        step_seconds=0.38,
        mfu=0.412,
        data_wait=0.0031,
        eta_seconds=11.8,
    ),
    memory_gib=1.93,
)


def with_speed(**changes: Any) -> Record:
    return replace(RECORD, speed=replace(RECORD.speed, **changes))


EVALUATION = Evaluation(step=120, loss=3.4567, targets=12_345)


# The console


def test_the_line() -> None:
    shows(
        progress_line(RECORD),
        "120/150 | loss 3.214",
        "| ETA 0:12",
        "9.1e-4",
        "0.83 | 21.4k tok/s",
        "MFU 41% | 1.9",
        "GiB",
        "0.3%",
    )


def test_the_line_leaves_out_what_is_not_known() -> None:
    slow = with_speed(mfu=None, tokens_per_second=812.4, eta_seconds=3_723.0)
    unknown = replace(slow, loss=math.nan, gradient_norm=None, learning_rate=0.0)
    sparse = replace(unknown, loss_scale=65536.0, skipped=2)
    shows(
        progress_line(sparse),
        "120/150",
        "loss nan",
        "ETA 1:02:03",
        "0 | 812 tok/s",
        "| 1.9 GiB",
        "0.3%",
        "65536 | skipped 2",
    )
    assert "| ETA ? |" in progress_line(with_speed(eta_seconds=math.inf))
    longest = replace(with_speed(eta_seconds=360_000.0), step=999_999, total_steps=999_999)
    assert "ETA 100:00:00" in progress_line(longest)[:80]
    assert "| 1.3M tok/s |" in progress_line(with_speed(tokens_per_second=1.26e6))


def run(console: Console, steps: int, every: int, start: int = 0) -> None:
    for step in range(start + every, steps + 1, every):
        console.record(replace(RECORD, step=step, total_steps=steps))
    console.close()


@pytest.mark.parametrize(
    ("steps", "every", "start"), [(1, 1, 0), (150, 10, 0), (999, 1, 0), (150, 1, 77)]
)
def test_in_a_pipe_each_record_is_a_line(steps: int, every: int, start: int) -> None:
    text = StringIO()
    run(Console(Terminal(file=text, force_terminal=False, width=40)), steps, every, start)
    assert text.getvalue().splitlines() == [
        progress_line(replace(RECORD, step=step, total_steps=steps))
        for step in range(start + every, steps + 1, every)
    ]


def test_an_evaluation_is_a_line_of_its_own() -> None:
    text = StringIO()
    Console(Terminal(file=text, force_terminal=False)).evaluation(EVALUATION)
    shows(text.getvalue(), "120 | evaluation loss", "3.457 | 12,345 targets")


def on_a_screen(written: str) -> list[str]:
    """The lines that stay on a terminal: what moves up and clears writes over those above."""
    screen, row = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[[?0-9;]*[A-Za-z])", written):
        if part == "\n":
            row += 1
            screen += [""] * (row == len(screen))
        elif part == "\x1b[1A":
            row -= 1
        elif part in ("\x1b[2K", "\r") or not part.startswith("\x1b"):
            screen[row] = "" if part == "\x1b[2K" else screen[row] + part.strip("\r")
    return [line for line in screen if line]


def test_on_a_terminal_each_record_stays_whole_above_one_live_line() -> None:
    text = StringIO()
    terminal = Terminal(
        file=text, force_terminal=True, width=60, color_system=None, highlight=False
    )
    console, signs = Console(terminal), Signs(terminal)
    for step in (119, 120):
        for phase in (Phase.WAITING, Phase.TRAINING, Phase.LOGGING):
            signs.at_step(step, 150, phase)
            time.sleep(0.05)
        console.record(replace(RECORD, step=step))
    signs.at_step(120, 150, Phase.EVALUATING)
    console.evaluation(EVALUATION)
    signs.close()
    shown = on_a_screen(text.getvalue())
    first, second = (
        [
            f"step {step}/150 | loss 3.214 | ETA 0:12 | lr 9.1e-4 | |g| 0.83",
            "        | 21.4k tok/s | MFU 41% | 1.9 GiB | data 0.3%",
        ]
        for step in (119, 120)
    )
    assert shown[:-1] == [*first, *second]
    shows(shown[-1], "step 120", "loss 3.457", "12,345 targets")
    assert "120/150, evaluating (0 s)" in text.getvalue()


def test_in_a_pipe_slow_steps_print_nothing_once_the_first_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.supervise.output._MOMENT", 0.05)
    monkeypatch.setattr("trainer.supervise.output._BETWEEN", 0.05)
    text = StringIO()
    signs = Signs(Terminal(file=text))
    signs.at("making the first step")
    signs.at_step(7, 150, Phase.TRAINING)
    deadline = time.monotonic() + 20
    while "making the first step" not in text.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    signs.at_step(8, 150, Phase.WAITING)
    time.sleep(0.1)
    before = text.getvalue()
    for step in (8, 9):
        signs.at_step(step, 150, Phase.TRAINING)
        time.sleep(0.2)
    signs.close()
    shows(before, "making the first")
    assert text.getvalue() == before


def test_between_logged_steps_a_pipe_has_a_line_in_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainer.run.observers import notices

    now = [0.0]
    monkeypatch.setattr(notices.time, "monotonic", lambda: now[0])
    text, shown = StringIO(), StringIO()
    signs = [
        notices.SignOfLife(Terminal(file=file, force_terminal=there), 99)
        for file, there in ((text, False), (shown, True))
    ]
    for step in range(1, 41):  # of 90 seconds each
        now[0] = 90.0 * step
        for sign in signs:
            sign.at(Phase.TRAINING, step)
    assert len(text.getvalue().splitlines()) == 5 and shown.getvalue() == ""


# Files


def read(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_a_full_disk_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    with raises(DiskError, "metrics.jsonl", "space left"):
        tracker.record(RECORD)
    tracker.close()


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.record(with_speed(mfu=None))
    tracker.evaluation(EVALUATION)
    tracker.record(replace(RECORD, step=121, loss=math.nan, gradient_norm=-math.inf, skipped=1))
    first, second, third = read(path)  # before it is closed: each line is there at once
    tracker.close()
    assert first == {
        "step": 120, "total_steps": 150, "samples": 3840, "tokens": 983_040, "loss": 3.2141, "learning_rate": 9.1e-4,
        "gradient_norm": 0.831, "tokens_per_second": 21_400.0, "step_seconds": 0.38, "memory_gib": 1.93,
        "data_wait": 0.0031, "eta_seconds": 11.8,
    }  # fmt: skip
    assert second == {"step": 120, "evaluation_loss": 3.4567, "evaluation_targets": 12_345}
    assert (third["loss"], third["gradient_norm"], third["skipped"]) == (None, None, 1)
    assert third["non_finite"] == {"loss": "nan", "gradient_norm": "-inf"}


@pytest.mark.parametrize("torn", ['{"step": 5, "lo', '{"step": 4}\n{"st', ""])
def test_json_lines_go_on_after_a_killed_run(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(torn)
    tracker = JsonLines(path)
    tracker.evaluation(EVALUATION)
    tracker.close()
    whole = [{"step": 4}] if "\n" in torn else []
    assert read(path) == [
        *whole,
        {"step": 120, "evaluation_loss": 3.4567, "evaluation_targets": 12_345},
    ]


# Other people's tools


def watched(folder: Path, *names: str) -> str:
    text = StringIO()
    opened = open_trackers(names, folder, Terminal(file=text))
    for tracker in opened:
        tracker.record(RECORD)
        tracker.record(replace(RECORD, step=130, loss=3.0))
        tracker.evaluation(replace(EVALUATION, step=130))
        tracker.close()
    assert len(opened) == 2 + len(names)
    assert len(read(folder / "metrics.jsonl")) == 3
    return text.getvalue()


def test_no_tracker_is_named(tmp_path: Path) -> None:
    watched(tmp_path)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watched(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("loss")] == [
        (120, 3.2141),
        (130, 3.0),
    ]
    assert [round(event.value, 4) for event in events.Scalars("evaluation_loss")] == [3.4567]


@pytest.fixture
def no_tracking_uri(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield


def test_mlflow(tmp_path: Path, no_tracking_uri: None) -> None:
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    from mlflow import MlflowClient

    watched(tmp_path / "mine", "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mine/mlflow.db'}")
    experiment = client.get_experiment_by_name("meshloom")
    [result] = client.search_runs([experiment.experiment_id])
    assert (result.info.run_name, result.info.status) == ("mine", "FINISHED")
    assert [
        (point.step, point.value) for point in client.get_metric_history(result.info.run_id, "loss")
    ] == [
        (120, 3.2141),
        (130, 3.0),
    ]
    assert result.data.metrics["evaluation_loss"] == 3.4567


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")

    monkeypatch.setenv("WANDB_MODE", "offline")
    watched(tmp_path / "mine", "wandb")
    [store] = (tmp_path / "mine" / "wandb").glob("offline-run-*/*.wandb")
    texts = (b"mine", b"3.2141", b"evaluation_loss", b"3.4567", b"120", b"130")
    deadline = time.monotonic() + 60  # a process of its own writes it
    while lacks := [
        text for text in texts if text not in store.read_bytes()
    ]:  # protocol buffers hold texts as they are
        assert time.monotonic() < deadline, lacks
        time.sleep(0.1)


FAKE = """
calls, config = [], {}
def init(**given):
    calls.append(("init", given))
    if given["experiment_name"] == "refused":
        raise OSError("no such server")
    return Run()
class Run:
    def log(self, values, step, **_):
        calls.append((step, values))
    def finish(self):
        calls.append("finish")
"""


def test_a_tracker_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SwanLab's, with a stand-in for its package: without Accelerate's state of the process."""
    from accelerate.state import PartialState

    (tmp_path / "swanlab.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    services.require(["swanlab"])
    watched(tmp_path / "mine", "swanlab")
    begin, first, second, last, end = sys.modules["swanlab"].calls
    logs = str(tmp_path / "mine" / "swanlog")
    wanted = {"project": "meshloom", "experiment_name": "mine", "logdir": logs}
    assert begin == ("init", wanted) and end == "finish"
    assert (first[0], first[1]["loss"], second[0]) == (120, 3.2141, 130)
    assert last == (130, {"evaluation_loss": 3.4567, "evaluation_targets": 12_345.0})
    assert PartialState._shared_state == {}
    with raises(ConfigError, "swanlab", "no such server", "login"):
        watched(tmp_path / "refused", "swanlab")


def test_a_run_goes_on_without_a_tracker_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console and `metrics.jsonl` get all; a tracker that fails at once is one sentence."""

    class Away:
        def __init__(self, folder: Path) -> None:
            if folder.name == "refused":
                raise OSError("no such server")

        def record(self, record: Record) -> None:
            raise OSError("the server is away")

        def evaluation(self, evaluation: Evaluation) -> None:
            raise AssertionError("called after it has failed")

        close = record

    class Shut(Away):
        record = evaluation = lambda self, item: None

        def close(self) -> None:  # type: ignore[override]
            raise OSError("not closed")

    monkeypatch.setitem(plugins.NAMED["tracker"], "own:away", Away)
    monkeypatch.setitem(plugins.NAMED["tracker"], "own:shut", Shut)
    shown = watched(tmp_path, "own:away", "own:shut")
    notes = [line for line in shown.splitlines() if line.startswith("note:")]
    shows_each(notes, ("own:away", "the server is away"), ("own:shut", "not closed"))
    with raises(ConfigError, "own:away", "no such server"):
        watched(tmp_path / "refused", "own:away")


@pytest.mark.parametrize("name", get_args(plugins.Service))
def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert name in LOGGER_TYPE_TO_CLASS
    monkeypatch.setattr(services, "installed", lambda wanted: wanted != name)
    with pytest.raises(ConfigError) as caught:
        services.require([name])
    shows(caught.value, f'trainer.log.trackers: "{name}"', f"{name}", f"pip install {name}")


def test_a_folder_of_its_name_is_no_tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """wandb leaves a folder "wandb" where a script is started from."""
    (tmp_path / "wandb_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(services._PACKAGES, "wandb", ("wandb_of_nobody",))
    with pytest.raises(ConfigError, match="without the package wandb_of_nobody"):
        services.require(["wandb"])


@pytest.mark.more
def test_weights_and_biases_without_a_login_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | {
        "HOME": str(tmp_path)
    }
    code = "from trainer.trackers import require; require(['wandb'])"

    def said(**more: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=bare | more,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return result.stderr

    shows(said(), "trainer.log.trackers", "login", "WANDB_API_KEY", "WANDB_MODE=offline")
    assert "Error" not in said(WANDB_MODE="offline") and "Error" not in said(WANDB_API_KEY="a" * 40)
    code = (
        "from pathlib import Path; from trainer.trackers.services import Opened; "
        "Opened('wandb', Path('.'), print)"
    )
    assert "ConfigError: wandb: " in said(WANDB_API_KEY="short")


@pytest.mark.parametrize("there", ["a pipe", "a folder"])
def test_lines_that_have_no_file_are_a_disk_error_at_once(tmp_path: Path, there: str) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path) if there == "a pipe" else path.mkdir()
    with pytest.raises(DiskError, match="metrics.jsonl"):
        JsonLines(path)
