"""What an installed version lacks, or a DeepSpeed that is not there, is refused in a sentence."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support.commands import ROOT, Result, losses, run, write_job
from tests.support.layouts import LAYOUTS
from tests.support.messages import shows
from tests.support.training import layout_of
from trainer.engines import ENGINES
from trainer.engines.deepspeed import engine as deepspeed
from trainer.errors import ConfigError
from trainer.tools.planner import simulate

LAYOUT_OF = {name: layout_of(case) for name, case in LAYOUTS.items()}


@pytest.mark.parametrize("name", ["zero1", "zero2", "pipeline", "tensor"])
def test_an_old_deepspeed_does_not_run_what_it_gets_wrong(monkeypatch, name):
    monkeypatch.setattr(deepspeed, "version", lambda package: "0.18.9")
    refusal = ENGINES["deepspeed"].refusal(LAYOUT_OF[name])
    shows(refusal, "need DeepSpeed 0.19", "is 0.18.9")
    assert ENGINES["mesh"].refusal(LAYOUT_OF[name]) is None


@pytest.mark.parametrize("name", ["one rank", "ddp", "zero3"])
def test_an_old_deepspeed_runs_what_it_gets_right(monkeypatch, name):
    monkeypatch.setattr(deepspeed, "version", lambda package: "0.18.9")
    assert ENGINES["deepspeed"].refusal(LAYOUT_OF[name]) is None


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_an_old_pytorch_does_not_run_v_shaped_schedules(monkeypatch, name):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    layout = layout_of(replace(LAYOUTS["pipeline"], schedule=name))
    refusal = ENGINES["mesh"].refusal(layout)
    shows(refusal, f"trainer.pipeline_schedule {name} needs PyTorch", "2.15", "is 2.10")
    assert ENGINES["mesh"].refusal(LAYOUT_OF["pipeline"]) is None


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0"])
def test_a_plan_that_fails_names_the_pytorch_that_it_needs(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send((None, "UnsupportedOperatorException: c10d.allreduce_.default"))
    with pytest.raises(ConfigError) as caught:
        simulate._received(0, SimpleNamespace(join=lambda: None), ours)
    assert ("need PyTorch 2.15" in str(caught.value)) == (version == "2.10.0")


def test_a_folder_of_its_name_is_no_deepspeed(monkeypatch, tmp_path):
    (tmp_path / "deepspeed").mkdir()  # of its configs, where a command is started
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    refusal = ENGINES["deepspeed"].refusal(LAYOUT_OF["one rank"])
    shows(refusal, "DeepSpeed", "pip install")


HIDDEN = """
import importlib.metadata as metadata, os, sys
def found(name, found=metadata.Distribution.from_name):
    if name == "deepspeed":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.Distribution.from_name = found
sys.modules["deepspeed"] = None
os.environ.pop("TORCH_EXTENSIONS_DIR", None)
"""


def without_deepspeed(folder: Path, command: str, *arguments: str | Path) -> Result:
    """Run a command where DeepSpeed is not there: neither its modules nor its version."""
    (folder / "sitecustomize.py").write_text(HIDDEN)
    words = (sys.executable, "-m", "trainer.command", command, *arguments)
    return run(*words, timeout=250, PYTHONPATH=f"{folder}:{ROOT}")


@pytest.mark.more
def test_without_deepspeed_a_job_trains_on_another_engine(tmp_path):
    job = write_job(tmp_path, steps=2)
    result = without_deepspeed(tmp_path, "train", "--config", job)
    assert result.code == 0, result.output
    assert "engine deepspeed" not in result.output and "steps" in result.output
    assert [len(losses(path)) for path in (tmp_path / "runs").iterdir()] == [3]
    requested = without_deepspeed(tmp_path, "train", "--config", job, "trainer.engine=deepspeed")
    assert requested.code == 64, requested.output
    assert "pip install 'meshloom[deepspeed]'" in requested.output


@pytest.mark.more
@pytest.mark.parametrize("command", ["train", "verify", "plan"])
def test_a_deepspeed_that_can_not_be_imported_is_one_sentence(tmp_path, command):
    if command == "plan" and torch.__version__ < "2.15":
        pytest.skip("the planner needs PyTorch 2.15 for two ranks, and says so first")
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise ImportError('no name log')")
    words = (sys.executable, "-m", "trainer.command", command, "--config", "zero2")
    result = run(*words, timeout=250, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.code == 64 and "Traceback" not in result.output, result.output
    shows(result.output, "import fails: ImportError")


@pytest.mark.more
@pytest.mark.parametrize(("command", "ranks"), [("verify", "--world-size"), ("plan", "--gpus")])
def test_without_deepspeed_a_layout_is_verified_and_planned(tmp_path, command, ranks):
    if command == "plan" and torch.__version__ < "2.15":
        pytest.skip("the planner needs PyTorch 2.15: fake tensors of 2.10 have no allreduce_")
    job = write_job(tmp_path, steps=2)
    arguments = ["--config", job, ranks, "2", "scheduler.type=cosine"]
    result = without_deepspeed(tmp_path, command, *arguments)
    assert result.code == 0, result.output


@pytest.mark.more
def test_a_schedule_of_deepspeeds_is_verified_with_deepspeed_alone(tmp_path):
    result = without_deepspeed(tmp_path, "verify", "--config", write_job(tmp_path, steps=2))
    assert result.code == 64 and "scheduler.type: WarmupCosineLR" in result.output, result.output
