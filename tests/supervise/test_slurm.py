"""`launch/slurm.sbatch` and ranks that srun starts, by stand-ins for `srun` and `scontrol`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.commands import BIN, ROOT, warm_server, write_job
from trainer.supervise.world import World, first_host, from_slurm, world_of

SRUN = """#!{python} -S
import json, os, signal, subprocess, sys, time
options = [word for word in sys.argv[1:] if word.startswith("--kill") or word.startswith("--cpus")]
command = sys.argv[len(options) + 2:]  # the number of cores is a word of its own
with open({record!r}, "a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "folder": os.getcwd()}}) + "\\n")
if "FAKE_CODE" in os.environ:  # nothing runs
    if os.environ["FAKE_CODE"] == "when asked":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))  # as torchrun ends
        print("runs", flush=True)
        while True:
            time.sleep(0.05)
    sys.exit(int(os.environ["FAKE_CODE"]))
count = int(os.environ["SLURM_NTASKS_PER_NODE"])
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": str(count)}}
step |= {{"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}}
tasks = [
    subprocess.Popen(command, env=os.environ | step | {{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}})
    for task in range(count)
]
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") printf 'localhost\\nnode-b\\n' ;;
  "show job") printf 'JobId=%s JobName=meshloom\\n   Command={script} job.json\\n   WorkDir=/\\n' "$3" ;;
  requeue*) echo "$2" >> {requeued} ;;
esac
"""


class Slurm:
    """A node as a batch script finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        (folder / "spool").mkdir()
        self.record, self.requeued = folder / "srun.jsonl", folder / "requeued"
        script = ROOT / "launch" / "slurm.sbatch"
        self.copy = shutil.copy(script, folder / "spool" / "slurm_script")
        self._write("srun", SRUN.format(python=sys.executable, record=str(self.record)))
        self._write("scontrol", SCONTROL.format(script=script, requeued=self.requeued))
        self._write("python", f'#!/bin/bash\nexec {warm.PYTHON} "$@"\n')
        self._write("torchrun", f'#!/bin/bash\nexec {warm.PYTHON} {BIN}/torchrun "$@"\n')

    def _write(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        given = {
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NNODES": "1",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_CPUS_PER_TASK": "16",
            "SLURM_GPUS_ON_NODE": "4",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            ["bash", str(self.copy), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            start_new_session=True,
            env=os.environ | given | environment,
        )

    def batch(self, *arguments: str | Path, **environment: str) -> tuple[int, list[str]]:
        """Run to its end; the exit code and what srun was given."""
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=200)
        assert self.record.exists(), output
        return process.returncode, json.loads(self.record.read_text().splitlines()[-1])["argv"]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_a_torchrun_for_each_node(slurm):
    code, argv = slurm.batch("job.json", "trainer.steps=3", FAKE_CODE="0", SLURM_NNODES="2")
    assert code == 0
    assert argv[:4] == ["--kill-on-bad-exit=1", "--cpus-per-task", "16", "torchrun"]
    options = dict(zip(argv[4:18:2], argv[5:18:2], strict=True))
    assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "4")
    assert "SIGUSR1" in options["--signals-to-handle"].split(",")
    assert argv[-4:] == [
        str(ROOT / "launch" / "train.py"),
        "--config",
        "job.json",
        "trainer.steps=3",
    ]
    other = slurm.batch("job.json", FAKE_CODE="0", SLURM_JOB_ID="123457")[1]
    ends = [options["--rdzv-endpoint"], other[other.index("--rdzv-endpoint") + 1]]
    assert ends == ["localhost:13456", "localhost:13457"]


def test_a_task_for_each_rank(slurm):
    argv = slurm.batch(
        "job.json", FAKE_CODE="0", SLURM_NTASKS_PER_NODE="4", SLURM_CPUS_PER_TASK="8"
    )[1]
    assert argv[1:] == [
        "--cpus-per-task",
        "8",
        "python",
        str(ROOT / "launch" / "train.py"),
        "--config",
        "job.json",
    ]


def test_without_a_checkout_the_installed_one_runs(slurm):
    text = (slurm.bin / "scontrol").read_text().replace(str(ROOT / "launch"), "/nowhere")
    (slurm.bin / "scontrol").write_text(text)
    argv = slurm.batch("zero2", FAKE_CODE="0", SLURM_NTASKS_PER_NODE="4")[1]
    assert argv[3:] == ["python", "-m", "trainer.command", "train", "--config", "zero2"]


def test_the_environment_is_sourced_first(slurm):
    (slurm.folder / "env").write_text('echo "$UNSET"; export FAKE_CODE=7\n')
    assert slurm.batch("job.json", MESHLOOM_ENV=str(slurm.folder / "env"))[0] == 7


@pytest.mark.parametrize(
    ("code", "again"), [("0", False), ("64", False), ("70", False), ("75", True), ("137", False)]
)
def test_a_stop_is_queued_again_and_a_failure_is_not(slurm, code, again):
    assert slurm.batch("job.json", FAKE_CODE=code)[0] == int(code)
    assert slurm.requeued.exists() is again
    assert not again or slurm.requeued.read_text() == "123456\n"


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_signal_before_the_limit_reaches_the_ranks_and_queues_again_but_not_after_scancel(
    slurm, cancelled
):
    process = slurm.start("job.json", FAKE_CODE="when asked")
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    if cancelled:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 1
    assert slurm.requeued.exists() is not cancelled


def test_the_lines_for_sbatch():
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    given = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    assert {"--signal=B:USR1@600", "--requeue", "--open-mode=append", "--output=%x-%j.out"} <= set(
        given
    )


@pytest.mark.more
@pytest.mark.parametrize("ranks", ["torchrun", "srun"])
def test_it_saves_before_the_limit_and_goes_on_when_it_is_queued_again(slurm, ranks, tmp_path):
    job = write_job(tmp_path, steps=5000)
    environment = {
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_NTASKS_PER_NODE": "2" if ranks == "srun" else "1",
    }
    environment |= {warm.SOCKET: warm_server(), "PYTHONPATH": str(ROOT)}
    # jobs on one machine, too, have ports of their own
    environment["SLURM_JOB_ID"] = "123456" if ranks == "srun" else "234567"
    saved = 0
    for _ in range(2):
        process = slurm.start(job, **environment)
        assert process.stdout is not None
        text = ""
        while not re.search(r"^step \d+/", text, re.MULTILINE):
            line = process.stdout.readline()
            assert line, text
            text += line
        if saved:
            assert f"/step-{saved:06d}: step {saved}, " in text, text
        process.send_signal(signal.SIGUSR1)
        text += process.communicate(timeout=100)[0]
        assert process.returncode == (75 if ranks == "srun" else 1), text
        assert "checkpoint saved" in text
        newest = max((tmp_path / "runs" / "job" / "checkpoints").glob("step-*"))
        assert int(newest.name[5:]) > saved
        saved = int(newest.name[5:])
    assert slurm.requeued.read_text() == f"{environment['SLURM_JOB_ID']}\n" * 2


def slurm_step(**changed: str) -> dict[str, str]:
    names = {
        **{"PROCID": "9", "LOCALID": "1", "NODEID": "4", "JOB_ID": "19999", "STEP_ID": "0"},
        **{
            "STEP_NUM_TASKS": "10",
            "STEP_TASKS_PER_NODE": "2(x5)",
            "STEP_NODELIST": "gpu[003-005,9],cpu1",
        },
    }
    return {f"SLURM_{name}": value for name, value in (names | changed).items() if value}


def test_ranks_of_srun_are_told_as_torchrun_tells_its():
    environment = slurm_step()
    assert world_of(environment) == World(9, 1, 10, 2)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("gpu003", "29999")
    again = slurm_step(STEP_ID="1", STEP_TASKS_PER_NODE="2(x4),1,1", NODEID="5")
    assert (from_slurm(again)["LOCAL_WORLD_SIZE"], from_slurm(again)["MASTER_PORT"]) == (
        "1",
        "11008",
    )
    chosen = from_slurm(slurm_step() | {"MASTER_ADDR": "head", "MASTER_PORT": "5"})
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("head", "5")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        slurm_step(STEP_ID=""),  # a batch script
        slurm_step() | {"SLURM_PTY_PORT": "1"},  # a person's shell
        slurm_step(STEP_NUM_TASKS="1"),  # which starts its processes itself
    ],
)
def test_where_srun_started_no_ranks_nothing_changes(environment):
    assert from_slurm(environment) == {}
    assert world_of(dict(environment)) is None


def test_what_torchrun_says_under_srun_holds():
    messages = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    environment = slurm_step() | messages
    assert world_of(environment) == World(3, 3, 4, 4)
    assert "MASTER_ADDR" not in environment


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[1-3],b", "a1"),
        ("n[007,009]", "n007"),
        ("r[1-2]n[03-04]-ib,x", "r1n03-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first
