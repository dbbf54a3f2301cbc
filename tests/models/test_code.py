"""An edit of the code that is trained is an error when a run resumes, and a comment is none."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.support.checkpoint_pieces import ALONE, MODEL_FOLDER, STATE, live
from tests.support.commands import script
from tests.support.messages import shows
from tests.support.training import LLAMA, spec_of
from trainer import checkpoint
from trainer.checkpoint import save
from trainer.errors import ConfigError
from trainer.models.own.source import source_of
from trainer.run import describe
from trainer.run.prepare import Prepared
from trainer.run.start.changes import refuse_changed

OWN = '''
import functools
import torch
from torch import nn
from torch.nn import functional as F
import beside

SCALE = 2.0

def helper(hidden):
    return hidden * SCALE

class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden):
        return hidden ** 2

class Base(nn.Module):
    def mixed(self, hidden):
        return hidden + 1

class Net(Base):
    """Described."""
    def __init__(self, width=8, rate=0.1):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(rate))
        self.scale = 0.5
        self.act = lambda hidden: hidden.tanh()
        self.power = functools.partial(torch.pow, exponent=2)
    def forward(self, rows):  # a comment
        hidden = self.mixed(self.body(rows))
        return beside.last(self.act(helper(hidden)) + Square.apply(hidden))

def loss_of(weight, power=1):
    def loss(output, target):
        return (output - target).abs().pow(power).sum() * weight, len(target)
    return loss

loss = loss_of(3.0)
other = [lambda: Net(), lambda: Net(rate=0.2)]
build = other[0]
'''
BESIDE = "def last(hidden):\n    return hidden\n"
EDITS = {
    "a comment": ("# a comment", "# another", ""),
    "white space": ("hidden = self", "hidden   =   self", ""),
    "a docstring": ("Described.", "Described otherwise.", ""),
    "another lambda of the line": ("rate=0.2", "rate=0.3", "model was edited"),
    "a forward": ("self.act(helper(hidden))", "self.act(helper(hidden + 1))", "Net was edited"),
    "what it inherits": ("hidden + 1", "hidden + 2", "Base was edited"),
    "a function that it calls": ("hidden * SCALE", "hidden / SCALE", "helper was edited"),
    "a global": ("SCALE = 2.0", "SCALE = 2.5", "SCALE was edited"),
    "a gradient of its own": ("hidden ** 2", "hidden ** 3", "Square was edited"),
    "an activation": ("hidden.tanh()", "hidden.sin()", "Net was edited"),
    "a class of torch": (
        "nn.ReLU",
        "nn.GELU",
        "Net was edited",
    ),
    "an argument of a module": ("rate=0.1", "rate=0.15", "Net was edited"),
    "an attribute": ("self.scale = 0.5", "self.scale = 0.6", "Net was edited"),
    "an argument that is bound": ("exponent=2", "exponent=3", "Net was edited"),
    "a closure": ("loss_of(3.0)", "loss_of(4.0)", "loss was edited"),
    "a default": ("power=1", "power=2", "loss_of was edited"),
    "a loss": (".abs()", ".square()", "loss_of was edited"),
    "another file": ("return hidden\n", "return -hidden\n", "last was edited"),
    "how it is built": ("[lambda: Net(), ", "[lambda: Net(8), ", "model was edited"),
}


def loaded(folder: Path, name: str, text: str) -> Any:
    path = folder / f"{name}.py"
    path.write_text(text)
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(text, path, "exec"), vars(module))  # not from a cache that goes by the second
    return module


def code(folder: Path, change: tuple[str, str] = ("", "")) -> dict[str, str]:
    loaded(folder, "beside", BESIDE.replace(*change))
    own = loaded(folder, "own_code", OWN.replace(*change))
    return source_of(own.build(), loss=own.loss, model=own.build)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_an_error_that_names_it(tmp_path, name):
    old, new, message = EDITS[name]
    assert old in OWN + BESIDE
    try:
        before, now = code(tmp_path), code(tmp_path, (old, new))
    finally:
        del sys.modules["beside"], sys.modules["own_code"]
    path = save(tmp_path, STATE, live().state_tensors(), {"sources": before}, MODEL_FOLDER, ALONE)
    description = {"data": {}, "model": {}, "sources": now}
    if message:
        with pytest.raises(ConfigError) as caught:
            refuse_changed(path, description)
        assert message in str(caught.value) and "--resume-anyway" in str(caught.value)
    else:
        assert refuse_changed(path, description) == []


OF_OLD = {
    "Net": "sha256 0a1b2c3d4e5f6071",
    "model": "lambda: Net()",
    "model.scale": "0.5",
    "body.*'s class": "Linear ReLU Dropout",
    "loss: weight": "3.0",
}
"""The digests of code and values by which version 0.9 described the model above."""


@pytest.mark.parametrize("old", [{}, {"code": OF_OLD}])
def test_digests_of_an_earlier_version_are_not_compared(
    tmp_path: Path, old: dict[str, dict[str, str]]
) -> None:
    """A checkpoint of then resumes; where it has digests, a line says so."""
    path = save(tmp_path, STATE, live().state_tensors(), old, MODEL_FOLDER, ALONE)
    here = {"data": {}, "model": {}, "sources": {"Net": "sha256 1", "model": "sha256 2"}}
    lines = refuse_changed(path, here)
    assert len(lines) == len(old)
    for line in lines:
        shows(line, "code", "earlier version")
    assert refuse_changed(path, {**here, "sources": {}}) == []


def test_what_was_typed_has_no_source() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("from torch import nn\nclass Typed(nn.Linear): pass", space)
    assert source_of(space["Typed"](2, 2), model=space["Typed"]) == {}


def test_of_a_model_of_an_installed_package_its_version_is_known(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    (folder / "some_model").mkdir(parents=True)
    (folder / "some_model" / "__init__.py").write_text(
        "from torch import nn\nclass Net(nn.Linear): pass\n"
    )
    about = folder / "some_models-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-models\nVersion: 1.2\n")
    (about / "top_level.txt").write_text("some_model\n")
    monkeypatch.syspath_prepend(folder)
    some_model = importlib.import_module("some_model")

    assert source_of(some_model.Net(2, 2))["package some-models"] == "1.2"


def test_another_version_of_a_library_is_said(tmp_path):
    path = save(
        tmp_path,
        STATE,
        live().state_tensors(),
        {"versions": {"transformers": "5.1"}},
        MODEL_FOLDER,
        ALONE,
    )
    (line,) = refuse_changed(path, {"data": {}, "model": {}, "versions": {"transformers": "5.2"}})
    shows(line, "changed since", '"5.1"', '"5.2"')


def test_of_a_library_nothing_is_noted():
    assert source_of(spec_of(LLAMA).build()) == {}


@pytest.mark.more
def test_a_run_from_python_goes_on_in_spite_of_it_if_that_is_asked_for(tmp_path):
    text = f"""
import torch, trainer
from torch import nn
from trainer.errors import ConfigError

class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 2), scale
    def forward(self, rows):
        return self.inner(rows) * self.scale

data = [(torch.ones(6) * i, torch.ones(2)) for i in range(64)]
loss = lambda output, target: ((output - target).square().sum(), len(target))
config = {{"train_batch_size": 8, "optimizer": {{"type": "SGD", "params": {{"lr": 1e-3}}}}, "trainer":
    {{"steps": 4, "device": "cpu", "checkpoint": {{"every": 2}}, "run": {{"folder": {str(tmp_path)!r}, "name": "a"}}}}}}
given = dict(data=data, loss=loss, quiet=True)
first = trainer.train(config, model=lambda: Net(1.0), **given)
again = dict(resume=first.folder / "checkpoints" / "step-000002", **given)
try:
    trainer.train(config, model=lambda: Net(9.0), **again)
except ConfigError as error:
    print("CAUGHT", error)
trainer.train(config, model=lambda: Net(9.0), resume_anyway=True, **again)
trainer.train(config, model=lambda: Net(1.0), **again)
print("RESUMED")
"""
    result = script(tmp_path, text)
    assert result.code == 0, result.output
    caught = result.output.split("CAUGHT ")[1]
    assert "model was edited" in caught and "resume_anyway=True" in caught and "RESUMED" in caught


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(self.drop(rows))


def squared(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), len(target)


def test_a_run_that_an_earlier_version_began_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints have `code` with digests of values, and no `sources`."""
    rows = [(torch.ones(6) * i / 64, torch.ones(2)) for i in range(64)]
    section = {"steps": 4, "device": "cpu", "checkpoint": {"every": 2}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}

    def job(name: str) -> dict[str, Any]:
        place = {"folder": str(tmp_path), "name": name}
        trainer_section = {**section, "run": place}
        return {"train_batch_size": 8, "optimizer": optimizer, "trainer": trainer_section}

    own: dict[str, Any] = {"model": Own, "data": rows, "loss": squared}
    now = describe.run_description

    def then(prepared: Prepared) -> dict[str, Any]:
        description = now(prepared)
        assert description.pop("sources").keys() >= {"Own", "squared"}
        return {**description, "code": OF_OLD}

    with monkeypatch.context() as patched:
        patched.setattr(describe, "run_description", then)
        whole = trainer.train(job("whole"), quiet=True, **own)
    source = whole.folder / "checkpoints" / "step-000002"
    assert "sources" not in checkpoint.read_description(source)
    again = trainer.train(job("again"), resume=source, **own)
    assert "an earlier version" in capfd.readouterr().out
    assert again.losses[-1] == whole.losses[-1]
    name = "final/model.safetensors"
    assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()
