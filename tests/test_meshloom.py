"""`import meshloom`: the objects and the modules of `trainer`, under the name of the project."""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshloom
import trainer
from meshloom.plugins import register
from tests.support.commands import ROOT
from trainer import plugins
from trainer.errors import ConfigError

SHARED = ("train", "verify", "open", "open_classifier", "Callback", "__version__", "__all__")


def test_it_has_the_objects_of_trainer() -> None:
    assert set(trainer.__all__) <= {*SHARED}
    assert [name for name in SHARED if getattr(meshloom, name) is not getattr(trainer, name)] == [
        "__all__"
    ]
    assert meshloom.__all__ == trainer.__all__
    with pytest.raises(AttributeError, match="meshloom"):
        _ = meshloom.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["errors", "config", "config.keys.key"])
def test_a_module_is_imported_once(name: str) -> None:
    ours = importlib.import_module(f"meshloom.{name}")
    module = importlib.import_module(f"trainer.{name}")
    assert ours is module and module.__name__ == f"trainer.{name}"
    assert module.__spec__ is not None and module.__spec__.name == f"trainer.{name}"


def test_what_is_registered_by_either_name_is_known() -> None:
    assert register is plugins.register


def test_an_error_is_caught_and_pickled_by_either_name() -> None:
    errors = importlib.import_module("meshloom.errors")
    assert errors.ConfigError is ConfigError
    assert pickle.loads(b"cmeshloom.errors\nConfigError\n.") is ConfigError
    assert b"meshloom" not in pickle.dumps(errors.ConfigError)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"meshloom\.nothing"):
        importlib.import_module("meshloom.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("meshloom.errors.nothing")


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, in which it looks for modules first, and then in the checkout."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_it_is_a_command_and_imports_no_library(tmp_path: Path) -> None:
    helped = python(tmp_path, "-m", "meshloom", "--help")
    assert helped.returncode == 0 and helped.stdout.startswith("usage: meshloom ")
    code = "import meshloom, meshloom.plugins, sys; print('torch' in sys.modules)"
    assert python(tmp_path, "-c", code).stdout == "False\n"


def test_somebody_elses_trainer_is_named(tmp_path: Path) -> None:
    """A file of that name beside the script, as many have, comes before ours."""
    (tmp_path / "trainer.py").write_text("steps = 3\n")
    failed = python(tmp_path, "-c", "import meshloom")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith(
        f"ImportError: the module `trainer` is {tmp_path}"
    )


def documented() -> Iterator[str]:
    """Yield the modules of `meshloom` that the docs and the examples name."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.py")]
    for path in paths:
        text = path.read_text()
        yield from re.findall(r"(?:from|import) (meshloom\.[\w.]+)", text)
        yield from re.findall(r"`(meshloom\.[a-z_.]+)\.[A-Z]\w+`", text)


def test_a_type_checker_finds_each_module_that_is_documented() -> None:
    """A stub names the same module of `trainer`, whose names it has."""
    stubs = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "meshloom").rglob("*.pyi")
    }
    named = {*documented()}
    assert {"meshloom.plugins", "meshloom.recipe", "meshloom.certify.case"} <= named <= {*stubs}
    for module, path in stubs.items():
        assert path.read_text() == f"from {module.replace('meshloom', 'trainer', 1)} import *\n"
