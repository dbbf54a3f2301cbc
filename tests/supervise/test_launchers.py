"""The same job under every launcher: the same losses, from the same samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import (
    BIN,
    ROOT,
    TRAIN,
    Result,
    agents,
    losses,
    metrics,
    run,
    sample_ids,
    train,
    write_job,
)
from tests.support.messages import shows
from trainer.supervise.world import free_port


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Started by `python launch/train.py --processes 2`."""
    folder = tmp_path_factory.mktemp("own")
    return folder / "runs" / "job", train("--config", write_job(folder), "--processes", "2")


def assert_same_run(folder: Path, reference: Path) -> None:
    assert losses(folder) == pytest.approx(losses(reference), rel=1e-5)
    assert sample_ids(folder) == sample_ids(reference)


@pytest.mark.more
def test_its_own_processes(reference):
    folder, result = reference
    assert result.code == 0, result.output
    assert len(losses(folder)) == 4
    assert sorted(path.name for path in (folder / "logs").glob("rank-*")) == [
        "rank-0.log",
        "rank-1.log",
    ]


@pytest.mark.more
def test_the_console_is_quiet(reference):
    _, result = reference
    assert len(result.lines) <= 30, result.output
    assert "warn" not in result.output.lower()
    starts = ("layout", "model", "data", "plan", "update", "applied", "step", "done")
    assert all(line.startswith(starts) for line in result.lines), result.output


@pytest.mark.more
def test_one_process_sees_the_same_samples(reference, tmp_path):
    result = train("--config", write_job(tmp_path))
    assert result.code == 0, result.output
    folder = tmp_path / "runs" / "job"
    assert sample_ids(folder) == sample_ids(reference[0])
    assert all(len(ids) == 8 for ids in sample_ids(folder).values())


@pytest.mark.parametrize(
    "launcher",
    [
        ("deepspeed", "--num_gpus", "2", "--master_port", "PORT"),
        ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT"),
        # without a GPU, accelerate starts several processes only when it is told that there are
        # several GPUs
        ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
         "no", "--dynamo_backend", "no", "--main_process_port", "PORT"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_under_a_launcher(launcher, reference, tmp_path):
    command = [str(free_port()) if word == "PORT" else word for word in launcher]
    result = run(*command, TRAIN, "--config", write_job(tmp_path))
    assert result.code == 0, result.output
    assert "done: " in result.output
    assert_same_run(tmp_path / "runs" / "job", reference[0])


@pytest.mark.more
def test_two_torchrun_agents(reference, tmp_path):
    job, port = write_job(tmp_path), str(free_port())
    common = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
    ]
    commands = [
        ["torchrun", *common, "--node-rank", str(node), TRAIN, "--config", job] for node in range(2)
    ]
    for result in agents(*commands):
        assert result.code == 0, result.output
    assert_same_run(tmp_path / "runs" / "job", reference[0])


@pytest.mark.more
def test_hsdp_over_two_nodes_of_two_ranks(tmp_path):
    """Sharded inside each node, replicated across: the losses are those of one process."""
    folder = tmp_path / "runs"
    job, port = write_job(tmp_path, mesh={"replicate": -1, "shard": 2}), str(free_port())
    # one process and four draw other dropout
    overrides = [
        "zero_optimization.stage=3",
        "trainer.model.config.attention_dropout=0",
        "train_batch_size=8",
    ]
    common = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
    ]
    commands = [
        [
            "torchrun",
            *common,
            "--node-rank",
            str(node),
            TRAIN,
            "--config",
            job,
            "trainer.run.name=hsdp",
            *overrides,
        ]
        for node in range(2)
    ]
    results = agents(*commands)
    for result in results:
        assert result.code == 0, result.output
    shows("".join(result.output for result in results), "layout", "replicate 2 x shard 2", "ZeRO-3")
    alone = train("--config", job, "trainer.run.name=alone", "trainer.mesh.shard=1", *overrides)
    assert alone.code == 0, alone.output
    assert_same_run(folder / "hsdp", folder / "alone")


@pytest.mark.more
def test_two_deepspeed_nodes_without_ssh(reference, tmp_path):
    job, port = write_job(tmp_path), str(free_port())
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    common = [
        "--hostfile",
        hostfile,
        "--no_ssh",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        port,
    ]
    commands = [
        ["deepspeed", *common, "--node_rank", str(node), TRAIN, "--config", job]
        for node in range(2)
    ]
    for result in agents(*commands):
        assert result.code == 0, result.output
    assert_same_run(tmp_path / "runs" / "job", reference[0])


@pytest.mark.more
def test_a_hostfile_that_is_named_and_missing(tmp_path):
    command = ("deepspeed", "--hostfile", "/nowhere/hosts", TRAIN)
    result = run(
        *command, "--config", write_job(tmp_path), cold=True
    )  # it looks at the processes above it
    assert result.code != 0
    shows(result.output, "--hostfile: /nowhere/hosts", "machines")
    assert not (tmp_path / "runs").exists()


KILLED = """
import os, runpy, signal, sys
sys.path.insert(0, {root!r})
sys.argv[0] = {train!r}
from trainer.engines.deepspeed.engine import DeepSpeedEngine
step = DeepSpeedEngine.step
def killed(self, number, *args, **kwargs):
    if number == 5 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number, *args, **kwargs)
DeepSpeedEngine.step = killed
runpy.run_path({train!r}, run_name="__main__")
"""


@pytest.mark.more
def test_a_rank_is_killed_and_the_agent_starts_the_run_again(tmp_path):
    """A Kubernetes job and `torchrun --max-restarts` do that: docs/kubernetes.md and docs/clusters.md."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(root=str(ROOT), train=TRAIN))
    common = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    common += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    job = write_job(tmp_path, steps=7, checkpoint={"every": 2, "keep_last": 9})
    result = run(*common, script, "--config", job, timeout=100)
    assert result.code == 0, result.output
    shows(
        result.output,
        "resumed",
        f"{tmp_path}/runs/job/checkpoints/step-000004: step 4, 32",
        "samples",
    )
    results = [
        (line["step"], line["loss"])
        for line in metrics(tmp_path / "runs" / "job")
        if "loss" in line
    ]
    assert [step for step, _ in results] == [*range(1, 6), *range(5, 8)]
    # a step that is made again has the same loss
    assert results[4] == results[5]


THREADS = """
import os, sys
sys.path.insert(0, {root!r})
os.sched_getaffinity = lambda _: range(8)
from trainer.supervise.process import share_of_cores
import torch
note = share_of_cores(2)
print(os.environ["RANK"], os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), note, flush=True)
"""


@pytest.mark.more
@pytest.mark.parametrize("given", [None, "1"])
def test_an_optimizer_on_the_host_has_the_cores_that_torchrun_would_leave_idle(
    tmp_path, monkeypatch, given
):
    """Unless a person has set OMP_NUM_THREADS."""
    script = tmp_path / "threads.py"
    script.write_text(THREADS.format(root=str(ROOT)))
    environment = {
        key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "RANK")
    }
    environment |= {} if given is None else {"OMP_NUM_THREADS": given}
    command = [
        sys.executable,
        BIN / "torchrun",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        script,
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    message = (
        "4 threads for the optimizer on the CPU, this process's share of the cores; "
        "OMP_NUM_THREADS sets it"
    )
    expected = f"1 4 {message}" if given is None else "1 1 None"
    assert sorted(done.stdout.splitlines()) == [f"0 {expected}", f"1 {expected}"]


WAITS = """
import os, sys
sys.path.insert(0, {root!r})
from trainer.command import run_command
from trainer.command.train import main
assert "torch" not in sys.modules
names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
run_command(lambda given, name: print(*map(os.environ.get, names)) or 0, [], "x")
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "None 5000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "9"}, "None 9"),
    ],
)
def test_threads_soon_sleep_while_they_wait(given, expected):
    """Unless the environment says otherwise; it is set before PyTorch is loaded."""
    code = WAITS.format(root=str(ROOT))
    own = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=own | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
