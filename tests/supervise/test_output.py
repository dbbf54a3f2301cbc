"""Output that can't be written: a full disk, a reader that has left, a closed descriptor."""

from __future__ import annotations

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest

from tests.support import warm
from tests.support.commands import ROOT, TRAIN, Result, metrics, run, warm_server, write_job
from tests.support.messages import shows
from trainer.storage import Unfailing

LOST = "note: the output can't be written (No space left on device): the run continues without"
SAYS = """
import sys
from trainer.command import run_command
run_command(lambda given, name: print("word " * {count}) or {code}, [], "x")
"""


def train(folder: Path, end: str, processes: int) -> Result:
    job = write_job(folder, steps=2, engine="mesh", evaluation={})
    python = sys.executable if "&-" in end else str(warm.PYTHON)  # which hands open files on
    words = shlex.join([python, TRAIN, "--config", str(job), "--processes", str(processes)])
    return run(
        "sh", "-c", f"{words} {end}", **{warm.SOCKET: warm_server(), "XDG_CACHE_HOME": str(folder)}
    )


def test_a_full_disk_under_the_console_does_not_end_training(tmp_path: Path) -> None:
    result = train(tmp_path, ">/dev/full", 1)
    assert (result.code, result.output.strip()) == (0, LOST)
    assert [row["step"] for row in metrics(tmp_path / "runs" / "job")] == [1, 2, 2]
    assert (tmp_path / "runs" / "job" / "final").is_dir()
    assert LOST in (tmp_path / "runs" / "job" / "logs" / "rank-0.log").read_text()


@pytest.mark.more
@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.jsonl", "logs/rank-0.log"])
def test_a_pipe_in_place_of_a_file_of_the_run_is_not_waited_for(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "runs" / "job" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    result = train(tmp_path, "", 1)
    assert result.code == 74, result.output
    shows(result.output, f"{pipe}", "address")


@pytest.mark.more
@pytest.mark.parametrize("end", [">&- 2>&-", ">/dev/full 2>/dev/full", "</dev/null 2>&1 | true"])
def test_wherever_the_output_goes_training_ends_well(tmp_path: Path, end: str) -> None:
    result = train(tmp_path, end, 2)
    assert (result.code, result.output) == (0, "")
    assert [row["step"] for row in metrics(tmp_path / "runs" / "job")] == [1, 2, 2]
    assert (tmp_path / "runs" / "job" / "final").is_dir()


@pytest.mark.parametrize(
    ("count", "code", "end", "expected"),
    [
        (1, 0, ">&-", 0),
        (10**5, 0, "| true", 0),
        (1, 0, ">/dev/full", 74),
        (10**5, 0, ">/dev/full", 74),
        (1, 76, ">/dev/full", 76),
        (1, 0, "<&- >&- 2>&-", 0),
    ],
)
def test_how_a_command_ends_whose_output_is_lost(
    count: int, code: int, end: str, expected: int
) -> None:
    command = shlex.join([sys.executable, "-c", SAYS.format(count=count, code=code)])
    words = ["bash", "-o", "pipefail", "-c", f"{command} {end}"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == expected, result.stderr
    if expected == 74:
        shows(result.stderr, "disk error", "standard output", "No space left")
    assert result.stderr.count("\n") == (expected == 74)


def test_what_a_file_does_not_take_is_left_out() -> None:
    failed: list[OSError] = []
    file = cast(TextIO, Unfailing(open("/dev/full", "w", buffering=1), failed.append))
    for _ in range(3):
        print("one\ntwo", file=file, flush=True)
    assert [error.errno for error in failed] == [errno.ENOSPC]
    assert not file.isatty() and file.fileno() > 2
    taken = io.StringIO()
    print("one", file=cast(TextIO, Unfailing(taken)))
    assert taken.getvalue() == "one\n"
