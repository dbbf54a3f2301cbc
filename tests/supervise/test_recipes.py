"""The recipes of `launch/` for Kubeflow and SkyPilot: their commands, with the platform's variables."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import warm
from tests.support.commands import BIN, ROOT, losses, warm_server, write_job
from tests.support.messages import shows
from trainer.supervise.world import free_port

NODES = 2


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "launch" / f"{name}.yaml").read_text()))


def kubeflow(node: int, port: int, job: Path, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The container of a pod of the job, as Kubeflow's torch plugin and Kubernetes start it."""
    trainer = documents("kubeflow")[1]["spec"]["trainer"]
    given = {each["name"]: each["value"] for each in trainer["env"]}
    given |= {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node)}
    given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    words = trainer["command"] + trainer["args"]
    words = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], word) for word in words]
    return [word.replace("my.json", str(job)) for word in words], given


def skypilot(node: int, port: int, job: Path, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The `run` of the task on a node."""
    [task] = documents("skypilot")
    given = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": str(node)}
    given |= {"SKYPILOT_NUM_NODES": str(NODES), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    given |= {"SKYPILOT_TASK_ID": "sky-managed-1", "CONFIG": str(job)}
    given |= {"COPY": f"file://{tmp_path}/copy"}
    assert task["envs"].keys() == {"CONFIG", "COPY"}
    return ["bash", "-c", task["run"].replace("29500", str(port))], given


@pytest.mark.more
@pytest.mark.parametrize("platform", [kubeflow, skypilot])
def test_the_command_of_each_node_trains(platform, tmp_path):
    job, port, bin = write_job(tmp_path), free_port(), tmp_path / "bin"
    bin.mkdir()
    (bin / "torchrun").write_text(f'#!/bin/bash\nexec {warm.PYTHON} {BIN}/torchrun "$@"\n')
    (bin / "torchrun").chmod(0o755)
    own = {warm.SOCKET: warm_server(), "PATH": f"{bin}:{os.environ['PATH']}"}
    nodes = []
    for node in range(NODES):
        command, given = platform(node, port, job, tmp_path)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **own}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        nodes.append(
            subprocess.Popen(command, cwd=ROOT, text=True, env=environment | given, **pipes)
        )
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * NODES, "\n".join(outputs)
    shows("".join(outputs), "layout", "shard 2, ZeRO-2")
    assert len(losses(tmp_path / "runs" / "job")) == 4
    assert platform is kubeflow or (tmp_path / "copy" / "job" / "final").is_dir()


def test_kubeflow_finds_the_runtime_and_its_container():
    """By these names the torch plugin finds what it gives its variables to."""
    runtime, job = documents("kubeflow")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert "torch" in runtime["spec"]["mlPolicy"]
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"
