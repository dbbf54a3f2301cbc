"""A run says what it will take of its device, refuses what can't fit, and says at its end what it
took.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.commands import ROOT, write_job
from tests.support.messages import raises, shows
from trainer.config import load
from trainer.distributed.ranks import Ranks
from trainer.engines import Machine
from trainer.engines.devices import DEVICES, GIB
from trainer.errors import ConfigError
from trainer.recipes.causal_lm.subject import LanguageSubject
from trainer.recipes.images.subject import ImageSubject

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = replace(DEVICES["t4-16gb"], name="a small one", memory=4 * GIB)
CHANGE = {
    "changes": {"zero_optimization.stage": 3},
    "fits": True,
    "comparison": "state 4.00 GiB -> 2.00 GiB",
}
SAID = {
    "layout": "shard 2",
    "fits": False,
    "needed": 5 * GIB,
    "room": 2 * GIB,
    "memory": {"peak_bytes": 5 * GIB, "by_kind": {"weights": 5 * GIB}},
    "proposals": [CHANGE],
}


def prepared(tmp_path, *overrides: str) -> SimpleNamespace:
    return SimpleNamespace(
        config=load(write_job(tmp_path), overrides), subject=LanguageSubject(*[None] * 3)
    )  # type: ignore[arg-type]


def machine(device: torch.device) -> Machine:
    return Machine(device, Ranks(0, 1))


@pytest.mark.more
def test_a_run_refuses_what_its_device_has_no_memory_for(tmp_path, monkeypatch):
    """All of it, on a host that has a few megabytes: before anything is built."""
    from rich.console import Console

    from trainer.run.run import execute
    from trainer.run.session import Session
    from trainer.run.start.request import Planner, Request
    from trainer.supervise.signals import NoSignals
    from trainer.tools.planner import memory_check

    monkeypatch.setattr(memory_check, "device_of", lambda machine: replace(SMALL, memory=6 * 2**20))
    monkeypatch.setattr(memory_check, "SECONDS", 600.0)  # where many tests share few cores
    config = load(write_job(tmp_path), ["trainer.plan=refuse", "trainer.engine=mesh"])
    request = Request(fresh=True, planner=Planner(memory_check.check_memory))
    with open(os.devnull, "w") as nowhere, pytest.raises(ConfigError) as caught:
        execute(Session(request, machine(CPU), Console(file=nowhere), NoSignals()), config)
    assert caught.value.exit_code == 64 and caught.value.shared
    text = str(caught.value)
    shows(text, "fullest rank")
    shows(text, "the 6.00 MiB", "small")
    shows(text, 'trainer.plan="warn" tries')
    (plan,) = tmp_path.glob("runs/*/plan.json")
    memory = json.loads(plan.read_text())["memory"]
    assert memory["peak_bytes"] == sum(memory["by_kind"].values()) > 6 * 2**20


@pytest.mark.more
def test_the_command_and_the_python_api_hand_the_check_over(tmp_path, monkeypatch):
    """A run that is given none checks nothing, and would say nothing of it."""
    import trainer
    from trainer.command import train
    from trainer.supervise.world import environment_of
    from trainer.tools.planner.recompute_choice import PLANNER

    requests = []
    for name, value in environment_of(0, 1, 29500).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "trainer.run.run.run", lambda config, request, *rest: requests.append(request) or 0
    )
    monkeypatch.setattr(
        "trainer.run.run.train_given",
        lambda config, given, request, quiet: requests.append(request),
    )
    path = str(write_job(tmp_path))
    assert train.command(train.options_of(["--config", path], "train"), None) == 0
    trainer.train(path)
    assert [request.planner for request in requests] == [PLANNER] * 2


@pytest.mark.more
def test_what_is_asked_for_is_predicted(tmp_path):
    from trainer.tools.planner.memory_check import wanted

    assert wanted(prepared(tmp_path), machine(GPU))
    assert not wanted(prepared(tmp_path), machine(CPU))
    assert wanted(prepared(tmp_path, "trainer.plan=warn"), machine(CPU))
    assert not wanted(prepared(tmp_path, "trainer.plan=off"), machine(GPU))
    digits = ROOT / "examples" / "digits.json"
    handed_in = load(digits, ["trainer.model.name_or_path=null"])
    images = ImageSubject(*[None] * 3)
    assert not wanted(SimpleNamespace(config=handed_in, subject=images), machine(GPU))
    assert wanted(SimpleNamespace(config=load(digits), subject=images), machine(GPU))


@pytest.mark.more
def test_a_warning_says_by_how_much_and_what_would_do(tmp_path, monkeypatch):
    from trainer.tools.planner import memory_check

    monkeypatch.setattr(memory_check, "simulated", lambda *_: SAID)
    result, lines = memory_check.predict(
        prepared(tmp_path, "trainer.plan=warn"), machine(GPU), tmp_path, SMALL
    )
    assert result == 5 * GIB
    shows(lines[0], "5.00 GiB predicted", "of 4.00 GiB")
    assert "miss by 3.00 GiB" in lines[1]
    shows(lines[1], "zero_optimization.stage=3", "4.00 GiB -> 2.00 GiB")
    assert json.loads((tmp_path / "plan.json").read_text()) == SAID
    with raises(ConfigError, "1.00 GiB too much", "zero_optimization.stage=3"):
        memory_check.predict(prepared(tmp_path), machine(GPU), tmp_path, SMALL)
    larger = replace(SMALL, memory=6 * GIB)  # what fits but for what CUDA itself takes may fit
    _, lines = memory_check.predict(prepared(tmp_path), machine(GPU), tmp_path, larger)
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; print('no such model', file=sys.stderr); sys.exit(64)", "no such model"),
        ("import time; time.sleep(60)", "more than 1 seconds"),
        ("print('{')", "Expecting"),
    ],
)
def test_what_cannot_be_predicted_is_a_line(tmp_path, monkeypatch, program, said):
    from trainer.tools.planner import memory_check

    monkeypatch.setattr(memory_check, "SECONDS", 1.0 if "sleep" in program else 60.0)
    monkeypatch.setattr(
        memory_check, "simulated", lambda *_: memory_check._answer([sys.executable, "-c", program])
    )
    result, (line,) = memory_check.predict(prepared(tmp_path), machine(GPU), tmp_path, SMALL)
    assert result is None
    shows(line, "predicted")
    assert said in line
    assert not (tmp_path / "plan.json").exists()


def test_the_end_says_both(monkeypatch):
    from trainer.tools.planner.memory_check import measured

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * GIB)
    (line,) = measured(5 * GIB, machine(GPU))
    shows(line, "4.00 GiB", "5.00 GiB predicted (+25.0%)")
    assert measured(None, machine(GPU)) == [] == measured(5 * GIB, machine(CPU))


def test_a_device_is_known_by_its_name_and_memory():
    from trainer.tools.planner.memory_check import named

    result = named("NVIDIA A100-SXM4-40GB", 39 * GIB)
    assert (result.peak, result.bandwidth, result.memory) == (
        312e12,
        DEVICES["a100-40gb"].bandwidth,
        39 * GIB,
    )
    assert named("NVIDIA H200", 140 * GIB).bandwidth == DEVICES["h200-141gb"].bandwidth
    assert (
        named("NVIDIA A10", 22 * GIB).peak == 125e12
    )  # not in the planner's table, but its peak is known
    assert named("another", GIB).memory == GIB


def test_the_simulating_process_is_no_rank():
    from trainer.tools.planner.memory_check import alone

    launcher = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "a",
        "TORCHELASTIC_RUN_ID": "x",
    }
    result = alone({**launcher, "HF_HOME": "/models", "CUDA_VISIBLE_DEVICES": "3"})
    assert not launcher.keys() & result.keys()
    assert result["HF_HOME"] == "/models" and result["CUDA_VISIBLE_DEVICES"] == ""
