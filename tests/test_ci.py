"""What `.ci/run` adds to pytest: a part of the slow tests for each commit, and a second try of what
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import part_of
from tests.support.sample import PARTS

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
from pathlib import Path

def test_passes(): pass

def test_passes_the_second_time():
    seen = Path("seen")
    tried = seen.exists()
    seen.touch()
    assert tried
"""


PLAIN = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Of the plugins that are installed, several import for seconds."""


def again(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(tests)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=folder, capture_output=True, env=PLAIN
    )
    command = [sys.executable, ROOT / ".ci" / "again.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=PLAIN)


def test_what_passes_alone_is_listed_as_flaky(tmp_path):
    found = again(tmp_path, TESTS)
    assert found.returncode == 0
    assert (
        found.stdout.splitlines()[-1]
        == "FLAKY (passed alone): test_some.py::test_passes_the_second_time"
    )


def test_what_fails_again_fails(tmp_path):
    found = again(tmp_path, TESTS + "\ndef test_fails(): assert False\n")
    assert found.returncode == 1
    assert "FAILED twice: test_some.py::test_fails" in found.stdout.splitlines()


def test_many_failures_are_no_chance(tmp_path):
    many = (
        "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_fails(n): assert False\n"
    )
    found = again(tmp_path, many)
    assert found.returncode == 1
    assert "again, alone" not in found.stdout


def test_a_file_that_cannot_be_imported_fails(tmp_path):
    assert again(tmp_path, "import nothing_of_this_name\n").returncode == 1


def test_nothing_failed_nothing_said(tmp_path):
    found = again(tmp_path, "def test_passes(): pass\n")
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("kind", ["test", "commit"])
def test_parts_are_equal(kind):
    counts = [0] * PARTS
    for index in range(5000):
        counts[part_of(f"{kind} {index}")] += 1
    assert max(counts) < 1.3 * min(counts)  # chance alone: three standard deviations are 15 % here
