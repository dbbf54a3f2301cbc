"""Real runs of two processes that are killed or asked to stop, in every phase: the same command
ends undisturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import run, sample_ids, start, write_job
from tests.support.run.interruptions import PHASES, command, environment, nothing_left
from trainer.checkpoint import newest

STEPS = 6


def job_in(folder: Path, asynchronous: bool = False) -> Path:
    saves = {"every": 2, "asynchronous": asynchronous}
    return write_job(
        folder, steps=STEPS, engine="mesh", checkpoint=saves, evaluation={"samples": 4, "every": 2}
    )


def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for path in (folder / "final").glob("*.safetensors")
        for name, t in load_file(path).items()
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    result = run(*command(folder, job_in(folder)), **environment(cache))
    assert result.code == 0, result.output
    return undisturbed(folder / "runs" / "job")


def goes_on(
    folder: Path, job: Path, cache: Path, whole: dict[str, torch.Tensor], step: int
) -> None:
    """The same command once more ends as if nothing had happened."""
    again = run(*command(folder, job), **environment(cache))
    assert again.code == 0, again.output
    assert f"step-{step:06d}: step {step}, {8 * step} samples seen" in again.output
    result = undisturbed(folder / "runs" / "job")
    assert result.keys() == whole.keys()
    assert all(torch.equal(result[name], whole[name]) for name in whole)
    assert sample_ids(folder / "runs" / "job").keys() == set(range(STEPS))


def reach(folder: Path, job: Path, cache: Path, phase: str) -> subprocess.Popen[str]:
    """A run that has come to a phase, and stays there for two seconds."""
    process = start(*command(folder, job, PHASES[phase]), **environment(cache))
    deadline = time.monotonic() + 60
    # before its first step a rank leaves at once, wherever the first one is
    wanted = [folder / "reached-0", folder / ("reached-1" if phase == "first step" else "pid-1")]
    while not all(path.exists() for path in wanted):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return process


@pytest.mark.first("saving-15-0")
@pytest.mark.parametrize(
    ("phase", "number", "at"),
    [
        ("imports", signal.SIGINT, "launcher"),
        ("data preparation", signal.SIGTERM, "launcher"),
        ("data preparation", signal.SIGUSR1, "1"),
        ("building the model", signal.SIGTERM, "0"),
        ("first step", signal.SIGUSR1, "1"),
        ("evaluation", signal.SIGINT, "launcher"),
        ("saving", signal.SIGTERM, "0"),
        ("saving beside the training", signal.SIGTERM, "1"),
    ],
)
def test_a_signal_in_each_phase(
    tmp_path: Path, cache: Path, whole: dict[str, torch.Tensor], phase: str, number: int, at: str
) -> None:
    job = job_in(tmp_path, asynchronous="beside" in phase)
    process = reach(tmp_path, job, cache, phase)
    os.kill(process.pid if at == "launcher" else int((tmp_path / f"pid-{at}").read_text()), number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert "Traceback" not in output and "internal error" not in output, output
    assert nothing_left(tmp_path)
    assert not list(cache.glob("meshloom/.partial-*"))
    result, skipped = newest(tmp_path / "runs" / "job" / "checkpoints")
    assert not skipped
    if phase in ("imports", "data preparation", "building the model"):
        assert result is None
        assert output.count("stopped by ") == 1, output
        return
    assert output.count("checkpoint saved") == 1
    assert result and not (tmp_path / "runs" / "job" / "final").exists()
    if phase != "first step":
        goes_on(tmp_path, job, cache, whole, int(result.name[-6:]))


OTHER_SIGNALS = """
import signal, time, trainer.supervise.signals as m
m.PATIENCE_SECONDS = 0.1
signals = m.StopSignals()
heard = []
signal.signal(signal.SIGCHLD, lambda *of: heard.append(of))
for _ in range(2):
    signal.raise_signal(signal.SIGCHLD)
time.sleep(0.5)
assert len(heard) == 2 and not signals.received
{ask}
print("still there")
"""
ASK = """
try:
    signal.raise_signal(signal.SIGTERM)
except m.Stopped:
    time.sleep(5)
"""


@pytest.mark.parametrize(
    ("ask", "code"), [("", 0), (ASK, 75)], ids=["they alone", "before one that asks"]
)
def test_other_signals_ask_for_nothing(ask: str, code: int) -> None:
    result = run(sys.executable, "-c", OTHER_SIGNALS.format(ask=ask))
    assert (result.code, "still there" in result.output) == (code, code == 0), result.output


@pytest.mark.more
def test_a_second_signal_ends_it_at_once(tmp_path: Path, cache: Path) -> None:
    process = reach(tmp_path, job_in(tmp_path), cache, "saving")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert nothing_left(tmp_path)
    assert newest(tmp_path / "runs" / "job" / "checkpoints") == (None, [])


IN_THE_SECOND_SAVE = """
import resource, signal
import trainer.checkpoint.faults as m
saves = []
def at(phase):
    saves.extend([phase] if phase == "before" else [])
    if len(saves) == 2 and {when}:
        {what}
m.at = at
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"


@pytest.mark.more
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waited for", "beside the training"])
@pytest.mark.parametrize(
    ("when", "what", "code"),
    [
        ("phase == 'flush'", KILL, 128 + signal.SIGKILL),
        ("phase == 'shard' and rank == 1", KILL, 128 + signal.SIGKILL),
        ("phase == 'before' and rank == 1", FULL.format(100_000), 74),
        ("phase == 'before'", FULL.format(50), 74),
    ],
    ids=["all are killed", "one is killed", "the disk is full", "not even the log has room"],
)
def test_an_end_in_the_second_save(
    tmp_path: Path,
    cache: Path,
    whole: dict[str, torch.Tensor],
    when: str,
    what: str,
    code: int,
    asynchronous: bool,
) -> None:
    job = job_in(tmp_path, asynchronous)
    fault = IN_THE_SECOND_SAVE.format(when=when, what=what)
    result = run(*command(tmp_path, job, fault), **environment(cache))
    assert result.code == code, result.output
    assert "Traceback" not in result.output
    assert result.output.count("File too large") == (code == 74)
    assert nothing_left(tmp_path)
    goes_on(tmp_path, job, cache, whole, step=2)
