"""What `.ci/run` adds to pytest: a part of the slow tests for each commit, and a second try of what
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.selection import PARTS, durations, exists, part_of_commit, parts_of, record

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
    result = again(tmp_path, TESTS)
    assert result.returncode == 0
    assert (
        result.stdout.splitlines()[-1]
        == "FLAKY (passed alone): test_some.py::test_passes_the_second_time"
    )


def test_what_fails_again_fails(tmp_path):
    result = again(tmp_path, TESTS + "\ndef test_fails(): assert False\n")
    assert result.returncode == 1
    assert "FAILED twice: test_some.py::test_fails" in result.stdout.splitlines()


def test_many_failures_are_no_chance(tmp_path):
    many = (
        "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_fails(n): assert False\n"
    )
    result = again(tmp_path, many)
    assert result.returncode == 1
    assert "again, alone" not in result.stdout


def test_a_file_that_cannot_be_imported_fails(tmp_path):
    assert again(tmp_path, "import nothing_of_this_name\n").returncode == 1


def test_nothing_failed_nothing_said(tmp_path):
    result = again(tmp_path, "def test_passes(): pass\n")
    assert (result.returncode, result.stdout) == (0, "")


def test_parts_take_equally_long_and_together_have_each_test():
    seconds = {f"test {index}": float(index % 29) for index in range(1000)}
    parts = parts_of(seconds, seconds.__getitem__)
    assert parts.keys() == seconds.keys()
    sums = [sum(seconds[test] for test, of in parts.items() if of == part) for part in range(PARTS)]
    assert max(sums) - min(sums) <= 29


def test_commits_pick_all_parts_equally_often():
    counts = Counter(part_of_commit(f"commit {index}") for index in range(5000))
    assert len(counts) == PARTS
    assert max(counts.values()) < 1.4 * min(counts.values())


def test_measured_durations_are_kept_for_tests_that_exist(tmp_path):
    here = "tests/test_ci.py::test_what_fails_again_fails"
    written = tmp_path / "durations.json"
    written.write_text('{"tests/test_ci.py": {"test_of_earlier": 9.0}}')
    record({here: 1.23, "tests/test_ci.py::test_nothing_failed_nothing_said": 0.1}, written)
    assert durations(written) == {here: 1.2}


def test_the_measured_durations_are_of_tests_that_exist():
    assert [node for node in durations() if not exists(*node.split("::", 1))] == []
