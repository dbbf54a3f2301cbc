"""The same job under every launcher: the same losses, from the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.processes import free_port
from tests.commands import TRAIN, Result, losses, run, sample_ids, start, train, write_job


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Started by `python launch/train.py --processes 2`."""
    folder = tmp_path_factory.mktemp("own")
    return folder / "runs" / "job", train("--config", write_job(folder), "--processes", "2")


def assert_same_run(folder: Path, reference: Path) -> None:
    assert losses(folder) == pytest.approx(losses(reference), rel=1e-5)
    assert sample_ids(folder) == sample_ids(reference)


def test_its_own_processes(reference):
    folder, result = reference
    assert result.code == 0, result.output
    assert len(losses(folder)) == 4
    assert sorted(path.name for path in (folder / "logs").glob("rank-*")) == ["rank-0.log", "rank-1.log"]


def test_the_console_is_quiet(reference):
    _, result = reference
    assert len(result.lines) <= 30, result.output
    assert "warn" not in result.output.lower()
    assert all(line.startswith(("layout", "model", "data", "plan", "done")) for line in result.lines), result.output


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
        # without a GPU, accelerate starts several processes only when it is told that there are several GPUs
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


def agents(first: list[str | Path], second: list[str | Path]) -> list[Result]:
    """Two commands at once, as if on two machines."""
    processes = [start(*first), start(*second)]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Result(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_two_torchrun_agents(reference, tmp_path):
    job, port = write_job(tmp_path), str(free_port())
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    commands = [["torchrun", *common, "--node-rank", str(node), TRAIN, "--config", job] for node in range(2)]
    for result in agents(*commands):
        assert result.code == 0, result.output
    assert_same_run(tmp_path / "runs" / "job", reference[0])


def test_hsdp_over_two_nodes_of_two_ranks(tmp_path):
    """Sharded inside each node, replicated across: the losses are those of one process."""
    folder = tmp_path / "runs"
    job, port = write_job(tmp_path, mesh={"replicate": -1, "shard": 2}), str(free_port())
    # one process and four draw other dropout
    overrides = ["zero_optimization.stage=3", "trainer.model.config.attention_dropout=0", "train_batch_size=8"]
    common = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    commands = [
        ["torchrun", *common, "--node-rank", str(node), TRAIN, "--config", job, "trainer.run.name=hsdp", *overrides]
        for node in range(2)
    ]
    results = agents(*commands)
    for result in results:
        assert result.code == 0, result.output
    assert any("layout  replicate 2 x shard 2, ZeRO-3" in result.output for result in results)
    alone = train("--config", job, "trainer.run.name=alone", "trainer.mesh.shard=1", *overrides)
    assert alone.code == 0, alone.output
    assert_same_run(folder / "hsdp", folder / "alone")


def test_two_deepspeed_nodes_without_ssh(reference, tmp_path):
    job, port = write_job(tmp_path), str(free_port())
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    common = ["--hostfile", hostfile, "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port]
    commands = [["deepspeed", *common, "--node_rank", str(node), TRAIN, "--config", job] for node in range(2)]
    for result in agents(*commands):
        assert result.code == 0, result.output
    assert_same_run(tmp_path / "runs" / "job", reference[0])


def test_a_hostfile_that_is_named_and_missing(tmp_path):
    result = run("deepspeed", "--hostfile", "/nowhere/hosts", TRAIN, "--config", write_job(tmp_path))
    assert result.code != 0
    assert "--hostfile: /nowhere/hosts: no such file; expected a list of machines" in result.output
    assert not (tmp_path / "runs").exists()
