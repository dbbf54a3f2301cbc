"""`pip install meshloom`: what the wheel holds, and its command in a folder elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.version import Version

from tests.support.commands import ROOT, Result, losses, run, write_job
from trainer.state import VERSION


def script(path: str) -> Any:
    """Import a script of the repository that is in no package."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


address = script(".ci/address.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: a build leaves files among its sources, and takes those of an earlier one."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    for name in ("meshloom", "trainer"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    folder = source.parent
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
    result = subprocess.run(
        [installed / "bin" / "meshloom", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return Result(result.returncode, result.stdout)


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


BUILD = """
import sys, setuptools.build_meta as build
folder = sys.argv[1]  # a build changes them
build.build_sdist(folder)
build.build_wheel(folder)
"""


@pytest.mark.more
def test_the_archive_and_its_wheel_are_what_is_published(source, tmp_path):
    """With the address of the clone that they are made from, which stands nowhere in the tree."""
    copy = shutil.copytree(
        source, tmp_path / "copy", ignore=shutil.ignore_patterns("build", "*.egg-info")
    )
    address.stamp(copy, "git@example.org:some/one.git")
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=copy, check=True, timeout=300)
    [archive], [built] = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        files = {name.removeprefix(f"{top}/") for name in opened.getnames()}
    assert shipped() | {"LICENSE", "README.md", "pyproject.toml"} <= files
    with zipfile.ZipFile(built) as opened:
        assert {name for name in opened.namelist() if ".dist-info/" not in name} == shipped()
        assert f"{top}.dist-info/licenses/LICENSE" in opened.namelist()
        text = opened.read(f"{top}.dist-info/METADATA").decode()
    metadata = Metadata.from_email(text)  # PyPI's own rules; raises for what it would reject
    assert metadata.license_expression == "Apache-2.0" and metadata.version == Version(VERSION)
    assert metadata.description_content_type == "text/markdown" and metadata.description
    assert [
        link
        for link in re.findall(r"\]\(([^)]+)\)", metadata.description)
        if link[:8] != "https://"
    ] == []
    assert metadata.project_urls is not None
    assert (
        metadata.project_urls["Changelog"] == "https://example.org/some/one/blob/HEAD/CHANGELOG.md"
    )
    needs = [
        one
        for one in metadata.requires_dist or []
        if one.marker is None or "extra" not in str(one.marker)
    ]
    marks = [one.marker for one in needs if one.name == "deepspeed"]
    assert [mark and mark.evaluate({"sys_platform": "darwin"}) for mark in marks] == [False]
    assert {"torch", "peft", "matplotlib"} <= {one.name for one in needs if one.marker is None}


def test_links_are_those_of_the_clones_address(tmp_path):
    page = "https://example.org/some/one"
    for given in (
        "git@example.org:some/one.git",
        f"{page}.git",
        "ssh://git@example.org/some/one",
        page,
    ):
        assert address.https(given) == page
    for wrong in ("/srv/one.git", "https://example.org/one", "../one"):
        with pytest.raises(ValueError, match="repository"):
            address.https(wrong)
    text = (
        "![c](docs/c.png) [d](docs/d.md#e) [f](https://f.org) [![g](../../g.svg)](../../g) [h](#i)"
    )
    assert address.absolute(text, page, "v1") == (
        f"![c]({page}/raw/v1/docs/c.png) [d]({page}/blob/v1/docs/d.md#e) [f](https://f.org) "
        f"[![g]({page}/g.svg)]({page}/g) [h](#i)"
    )


def test_the_version_is_that_of_the_citation_and_of_the_changelog():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["license"] == "Apache-2.0"
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflows_run_what_is_there():
    """They can't run here: that they are YAML, and that the programs that they name exist."""
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        programs = [
            word for step in steps for word in step.get("run", "").split() if word[:4] == ".ci/"
        ]
        assert programs and all(os.access(ROOT / program, os.X_OK) for program in programs), path
    publish = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"][
        "publish"
    ]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"


def test_each_extra_that_a_text_names_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    places += [*ROOT.glob("trainer/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    named = {
        extra: path.name
        for path in places
        for extra in re.findall(r"(?:meshloom|-e '\.)\[(\w+)\]", path.read_text())
        if path.name != "CHANGELOG.md"  # which also says what is gone
    }
    assert {"evaluate", "test"} <= named.keys() <= extras.keys()
    assert not any("deepspeed" in line for line in extras["test"])  # it comes with Meshloom


def test_windows_is_named_before_anything_is_imported(tmp_path):
    code = "import sys; sys.platform = 'win32'; import meshloom"
    failed = run(sys.executable, "-c", code, cold=True, PYTHONPATH=str(ROOT))
    assert failed.code == 1 and "WSL2" in failed.lines[-1]


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
    message = meshloom(installed, tmp_path, "--help")
    assert message.code == 0 and all(
        f"meshloom {name} " in message.output
        for name in ("train", "verify", "checkpoint", "import")
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
