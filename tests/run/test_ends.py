"""What each signal does to a run, by who gets it and who started the run: the table of
docs/ends.md, row by row.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests.support.commands import ROOT, TRAIN, start, write_job
from tests.support.marked import MARK, ended, processes, ranks, sweep
from tests.support.messages import shows
from trainer.checkpoint import newest
from trainer.supervise.notes import Notes
from trainer.supervise.world import free_port, is_launcher

COMMANDS = {
    "meshloom": ("python", TRAIN, "--processes", "2"),
    "torchrun": ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT", TRAIN),
    "deepspeed": ("deepspeed", "--num_gpus", "2", "--master_port", "PORT", TRAIN),
    "accelerate": ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                   "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "PORT", TRAIN),
}  # fmt: skip
ROW = re.compile(
    r"^\| (\w+) \| (the launcher|a rank|all) \| (SIG\w+) \| (\S+) \| (yes|no) \|", re.MULTILINE
)
TABLE = ROW.findall((ROOT / "docs" / "ends.md").read_text())
STEPS = 100_000


def training(launcher: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A run in the middle of its steps."""
    job, mark = write_job(folder, steps=STEPS, engine="mesh", log={"every": 5}), uuid.uuid4().hex
    words = [str(free_port()) if word == "PORT" else word for word in COMMANDS[launcher]]
    if words[0] == "python":
        words[0] = str(Path(os.sys.executable))  # type: ignore[attr-defined]
    process = start(*words, "--config", job, cold=True, **{MARK: mark})
    metrics, deadline = folder / "runs" / "job" / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.1)
    return process, mark


@pytest.mark.more
@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(row[:3]).replace(" ", "_"))
def test_the_table_of_ends(tmp_path: Path, row: tuple[str, ...]) -> None:
    launcher, whom, name, code, saved = row
    process, mark = training(launcher, tmp_path)
    number = signal.Signals[name]
    try:
        if whom == "the launcher":
            process.send_signal(number)
        elif whom == "a rank":
            ranks(mark)[1].send_signal(number)
        else:
            os.killpg(process.pid, number)
        gone = ended(mark, 60)
        left = [" ".join(one.cmdline()[:4]) for one in processes(mark)]
    finally:
        sweep(mark)
    output, _ = process.communicate(timeout=30)
    assert gone, (left, output)
    shown = process.returncode if process.returncode >= 0 else 128 - process.returncode
    result, damaged = newest(tmp_path / "runs" / "job" / "checkpoints")
    assert str(shown) in code.split("/"), output[-3000:]
    assert ("yes" if result else "no", damaged) == (saved, []), output[-3000:]
    if saved == "yes" and launcher == "meshloom":
        last = output.splitlines()[-1]
        asked_by = signal.Signals(number).name if number != signal.SIGKILL else "SIG"
        shows(last, f"stopped by {asked_by}", "checkpoint saved", "resume")


@pytest.mark.more
def test_who_has_no_launcher_left_speaks_for_itself(tmp_path: Path) -> None:
    assert Notes(tmp_path, os.getppid()).write_end(0, "the end", 75)
    assert not Notes(tmp_path, os.getpid()).write_end(
        1, "the end", 75
    )  # somebody else is its parent now


def test_the_table_has_each_launcher_and_signal():
    for launcher in COMMANDS:
        rows = {(whom, name) for by, whom, name, _, _ in TABLE if by == launcher}
        assert {
            ("the launcher", name) for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGKILL")
        } <= rows
        assert {("a rank", "SIGTERM"), ("a rank", "SIGKILL"), ("all", "SIGINT")} <= rows


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("/usr/bin/python /venv/bin/torchrun --nproc-per-node 2 train.py", True),
        ("python3 -u -m deepspeed.launcher.launch --world_info=abc train.py", True),
        ("/usr/bin/python3 /venv/bin/deepspeed train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("accelerate launch train.py", True),
        ("bash run.sh torchrun", False),
        ("python launch/train.py --config deepspeed", False),
        ("tmux new torchrun", False),
        ("-zsh", False),
    ],
)
def test_which_parents_are_launchers(command, launches):
    assert is_launcher(command.split()) == launches
