"""`pip install meshloom`: what the wheel holds, and its command in a folder elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Result, losses, run, write_job


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = (
        folder / "source"
    )  # a build leaves files among its sources, and takes those of an earlier one
    for name in ("meshloom", "trainer"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    pip("install", "--target", wheel.parent / "installed", wheel)
    return wheel.parent / "installed"


def pip(command: str, *arguments: str | Path) -> None:
    result = run(
        sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--no-index", *arguments
    )
    assert result.code == 0, result.output


def meshloom(installed: Path, folder: Path, *arguments: str | Path) -> Result:
    """The installed command, run in `folder`."""
    found = subprocess.run(
        [installed / "bin" / "meshloom", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return Result(found.returncode, found.stdout)


def shipped() -> set[str]:
    """The files of the packages, and the configs, which a link has in `trainer/`."""
    kept = (".py", ".pyi", ".yml", ".j2", ".txt", ".bash", ".jinja", ".typed")
    modules = {
        str(path.relative_to(ROOT))
        for package in ("meshloom", "trainer")
        for path in (ROOT / package).rglob("*")
        if path.suffix in kept or path.name == "schema.json"
    }
    return modules | {f"trainer/ds_configs/{path.name}" for path in (ROOT / "ds_configs").iterdir()}


def test_the_wheel_holds_the_packages_and_the_configs(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == shipped()
    named = {"meshloom/py.typed", "trainer/py.typed", "trainer/config/schema.json"}
    assert named | {"meshloom/plugins.pyi", "trainer/ds_configs/zero2.json"} <= names


@pytest.mark.more
def test_a_shipped_config_trains_in_a_folder_elsewhere(installed, tmp_path):
    section = json.loads(write_job(tmp_path, steps=2, run={"folder": "runs"}).read_text())[
        "trainer"
    ]
    (tmp_path / "trainer.py").write_text("raise ImportError('the module of somebody else')")
    result = meshloom(
        installed,
        tmp_path,
        "train",
        "--config",
        "zero2",
        "--processes",
        "2",
        f"trainer={json.dumps(section)}",
    )
    assert result.code == 0, result.output
    run_folder = tmp_path / "runs" / "zero2"
    assert len(losses(run_folder)) == 3
    environment = json.loads((run_folder / "environment.json").read_text())
    assert environment["config"] == str(installed / "trainer" / "ds_configs" / "zero2.json")
    listed = meshloom(installed, tmp_path, "checkpoint", "list", run_folder)
    assert listed.code == 0 and listed.output.startswith("step-000002  "), listed.output


@pytest.mark.more
@pytest.mark.parametrize("command", ["train", "verify", "checkpoint", "import"])
def test_help(installed, tmp_path, command):
    result = meshloom(installed, tmp_path, command, "--help")
    assert result.code == 0 and result.output.startswith(f"usage: meshloom {command} "), (
        result.output
    )


@pytest.mark.more
def test_commands_are_told(installed, tmp_path):
    told = meshloom(installed, tmp_path, "--help")
    assert told.code == 0 and all(
        f"meshloom {name} " in told.output for name in ("train", "verify", "checkpoint", "import")
    )
    wrong = meshloom(installed, tmp_path, "trian")
    assert wrong.code == 2 and "invalid choice: 'trian'" in wrong.output


def test_the_dockerfile_copies_what_is_there_and_runs_the_readmes_command():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    copied = [name for word, *names in words if word == "COPY" for name in names[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"trainer", "launch", "ds_configs", "pyproject.toml"} <= set(copied)
    [base] = [names[0] for word, *names in words if word == "FROM"]
    assert ":" in base and not base.endswith(":latest")
    command = json.loads(lines[-1].removeprefix("CMD "))
    assert " ".join(command) in (ROOT / "README.md").read_text()
