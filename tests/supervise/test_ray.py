"""`launch/ray_train.py`: what each worker runs, and a run under Ray itself where it is installed."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from launch.ray_train import run_rank
from tests.support.commands import ROOT, metrics, start, train, write_job
from tests.support.messages import raises, shows

SCRIPT = str(ROOT / "launch" / "ray_train.py")
DRIVER = """
import runpy, sys, ray
ray.init(num_cpus=2, include_dashboard=False)
sys.argv = {words!r}
runpy.run_path({script!r}, run_name="__main__")
"""
OWN = {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason='Ray is not installed: pip install "ray[train]"'
)


def test_without_ray_one_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--workers", "2", "--config", "zero2"])
    with raises(SystemExit, "not installed", "pip install", "ray[train]"):
        runpy.run_path(SCRIPT, run_name="__main__")


@pytest.mark.parametrize("code", [0, 64, 65, 70, 75, 137])
def test_ray_starts_again_only_what_may_end_otherwise(monkeypatch, tmp_path, code):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    words = "import os; assert os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True'; "
    words += "assert 'ACCELERATE_TORCH_DEVICE' not in os.environ; "
    words += f"assert os.getcwd() == {str(tmp_path)!r}; os._exit({code})"
    job = {"command": [sys.executable, "-c", words], "folder": [str(tmp_path)]}
    if code in (0, 64, 65):
        assert run_rank(job) == code
        return
    with raises(RuntimeError, "rank 1 ended", f"exit code {code}"):
        run_rank(job)


@pytest.mark.more
@needs_ray
def test_two_workers_train_and_go_on_after_a_rank_was_killed(tmp_path):
    job = write_job(tmp_path, steps=100, engine="mesh", checkpoint={"every": 2})
    same = ["--config", str(job), "trainer.model.config.attention_dropout=0"]
    words = [SCRIPT, "--workers", "2", "--cpu", *same]
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(words=words, script=SCRIPT))
    process = start(sys.executable, driver, cold=True, **OWN)
    logged = tmp_path / "runs" / "job" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not logged.exists() or '"step": 3,' not in logged.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(_rank(1, job), signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    shows(output, "layout", "shard 2, ZeRO-2")
    assert "resumed from" in output
    alone = train(*same, "trainer.run.name=alone")
    assert alone.code == 0, alone.output
    expected = {line["step"]: line.get("loss") for line in metrics(tmp_path / "runs" / "alone")}
    lines = [line for line in metrics(tmp_path / "runs" / "job") if "loss" in line]
    assert {line["step"] for line in lines} == {*range(1, 101)}
    for line in lines[:20]:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-6)


@pytest.mark.more
@needs_ray
def test_an_error_of_the_config_ends_the_command_at_once(tmp_path):
    driver = tmp_path / "driver.py"
    words = [SCRIPT, "--workers", "2", "--cpu", "--config", str(write_job(tmp_path)), "no.key=1"]
    driver.write_text(DRIVER.format(words=words, script=SCRIPT))
    process = start(sys.executable, driver, cold=True, **OWN)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 64, output
    assert output.count("config error") == 1


def _rank(number: int, job: Path) -> int:
    """The process of a rank, by its command and its variables."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        ours = str(job) in words and words[1].endswith("/train.py")
        if ours and process.environ().get("RANK") == str(number):
            return process.pid
    raise AssertionError(f"no process of rank {number}")
