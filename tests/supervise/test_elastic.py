"""`torchrun --nnodes MIN:MAX`: a run resumes with fewer nodes, and with more, as one process does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, TRAIN, metrics, start, train, write_job
from tests.support.messages import shows
from trainer.command.train import checked_config, options_of
from trainer.errors import ConfigError
from trainer.supervise.world import cant_rejoin, free_port

Begin = Callable[..., subprocess.Popen[str]]
SCRIPT = """
import os, runpy, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
sys.argv[0] = {train!r}
from trainer.run import run
from trainer.supervise.signals import StopSignals
asked, receive, loop, reached = [], StopSignals._receive, run.loop, Path({reached!r})
def noted(self, number, frame):
    asked.append(number)
    receive(self, number, frame)
def looped(engine, *rest):
    step = engine.step
    def paused(number, *args, **kwargs):
        alone = os.environ["WORLD_SIZE"] == "1"
        while alone and not asked and (number >= {joined} or not reached.exists()):
            time.sleep(0.05)  # until the other node is there
        if number == {killed} and {lost}:
            reached.write_text(str(os.getpid()))
            time.sleep(1000)
        return step(number, *args, **kwargs)
    engine.step = paused
    return loop(engine, *rest)
StopSignals._receive, run.loop = noted, looped
runpy.run_path({train!r}, run_name="__main__")
"""
KILLED, JOINED, STEPS = 5, 9, 16
BATCH = ["trainer.model.config.attention_dropout=0", "train_batch_size=8"]
BATCH += ["train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=auto"]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start an agent at an address of its own, as if on another machine; `lost`: it stands still
    at a step, and leaves its rank's process in the file `reached`.
    """
    port, begun = free_port(), []

    def agent(address: str, *arguments: str | Path, lost: bool = False) -> subprocess.Popen[str]:
        script, facts = tmp_path / f"{lost}.py", {"reached": str(tmp_path / "reached")}
        facts |= {"joined": JOINED, "killed": KILLED, "lost": lost, "train": TRAIN}
        script.write_text(SCRIPT.format(root=str(ROOT), **facts))
        words = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        words += ["--rdzv-conf", "last_call_timeout=10"]
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = ["torchrun", *words, "--local-addr", address, script, *arguments]
        begun.append(start(*command, **own))
        awaited(lambda: _listens(port), begun[0])  # the first one has the rendezvous
        return begun[-1]

    yield agent
    for process in begun:
        process.kill()


def awaited(seen: Callable[[], bool], agent: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 150
    while not seen():
        if agent.poll() is not None or time.monotonic() > deadline:
            os.set_blocking(agent.stdout.fileno(), False)  # its ranks may still hold the pipe
            raise AssertionError(os.read(agent.stdout.fileno(), 1 << 20).decode())
        time.sleep(0.1)


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.more
@pytest.mark.parametrize(
    ("other", "local", "engine"),
    [("127.0.0.3", False, "deepspeed"), ("127.0.0.1", True, "mesh")],
    ids=["the last rank", "the first rank, folders of each node"],
)
def test_a_node_is_lost_and_another_one_joins(tmp_path, begin, other, local, engine):
    """Nodes are numbered by their addresses: those after 127.0.0.2 are the last."""
    section = {"steps": STEPS, "checkpoint": {"every": 2, "keep_last": 9}, "engine": engine}
    job = write_job(tmp_path, **section, run={"node_local": local})
    folders = [tmp_path / (name if local else "shared") for name in "abc"]
    common = [["--config", job, f"trainer.run.folder={folder}", *BATCH] for folder in folders]
    first = begin("127.0.0.2", *common[0])
    lost = begin(other, *common[1], lost=True)
    awaited((tmp_path / "reached").exists, first)
    lost.kill()
    os.kill(int((tmp_path / "reached").read_text()), signal.SIGKILL)
    alone = folders[0] / "job"
    logged = alone / "metrics.jsonl"
    awaited(lambda: logged.exists() and f'"step": {JOINED},' in logged.read_text(), first)
    new = begin(other, *common[2])
    outputs = [process.communicate(timeout=150)[0] for process in (first, new)]
    assert first.returncode == new.returncode == 0, outputs
    assert f"step-{KILLED // 2 * 2:06d}: step {KILLED // 2 * 2}, " in outputs[0]
    both = "".join(outputs)
    for layout in ("shard 2, ZeRO-2, float32, batch 8 = 2 x 2 x 2", "batch 8 = 2 x 4 x 1"):
        assert layout in both, both

    whole = tmp_path / "whole"
    result = train("--config", job, f"trainer.run.folder={whole}", *BATCH)
    assert result.code == 0, result.output
    expected = {line["step"]: line["loss"] for line in metrics(whole / "job") if "loss" in line}
    lines = [line for folder in {*folders} for line in metrics(folder / "job") if "loss" in line]
    assert {line["step"] for line in lines} == {*range(1, STEPS + 1)}
    for line in lines:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-6), line


@pytest.mark.parametrize(
    ("overrides", "world_size", "local", "fitting"),
    [
        (BATCH, 3, 1, "1; 2; 4"),
        (["tensor_parallel.autotp_size=2", *BATCH], 1, 1, "2; 4; 8"),
    ],
)
def test_a_number_of_nodes_that_does_not_fit_is_told_those_that_do(
    tmp_path, monkeypatch, overrides, world_size, local, fitting
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # of one node, too, by torchrun alone
    options = options_of(["--config", str(write_job(tmp_path)), *overrides], "train")
    with pytest.raises(ConfigError) as error:
        checked_config(options, world_size, local)
    nodes = f"nodes (processes on each: {local}): {world_size // local}; expected {fitting}"
    assert nodes in error.value.render()


def test_where_no_number_fits_only_the_mistake_is_named(tmp_path):
    overrides = ["pipeline.stages=3", *BATCH]
    options = options_of(["--config", str(write_job(tmp_path)), *overrides], "train")
    with pytest.raises(ConfigError) as error:
        checked_config(options, 4, 2)
    assert len(error.value.problems) == 1 and "not divisible by 3" in str(error.value)


def test_a_dry_run_lists_the_numbers_of_nodes(tmp_path):
    options = options_of(["--config", str(write_job(tmp_path)), *BATCH, "--dry-run"], "train")
    shows(checked_config(options, 2, 2).notes, "nodes (processes", "2", "1")


def test_torchruns_own_store_is_noted_where_a_node_may_come_back():
    facts = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    facts |= {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(cant_rejoin(facts))
    for other in ("TORCHELASTIC_USE_AGENT_STORE=False", "TORCHELASTIC_MAX_RESTARTS=0"):
        assert cant_rejoin(facts | dict([other.split("=")])) is None
    assert cant_rejoin(facts | {"WORLD_SIZE": "8"}) is None
    assert cant_rejoin({}) is None
