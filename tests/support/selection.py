"""Which tests a first run takes, and the equal parts of the others.

Marks decide, and measured durations:

- `@pytest.mark.more` leaves a test out of a first run, and `@pytest.mark.whole` also out of `--more`.
- `@pytest.mark.first("id", ...)` on a parametrised test names the cases that a first run takes; the
  others are `more`. Together the cases that run first have each engine, layout, launcher and kind of
  fault at least once. `first` without cases is for all of them, however long they take.
- All other tests run first, unless one was measured to take longer than `SLOW`.

`python -m pytest --record-durations`, with any choice of tests, writes the least that was measured
of each to `tests/durations.json`. Do that on an idle machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from zlib import crc32

import pytest

PARTS = 24
"""The parts of `--part`: with one of them all of `.ci/run` takes 25 minutes."""
SLOW = 1.0
"""Seconds. A test that takes longer runs first only if it is named by `first`."""
LEAST = 0.5
"""Seconds. A shorter test is not written down, and what is not written down counts as this."""
ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "durations.json"


def durations(path: Path = FILE) -> dict[str, float]:
    """The measured seconds of each test that is not short, by its node id."""
    return {
        f"{file}::{name}": seconds
        for file, tests in json.loads(path.read_text()).items()
        for name, seconds in tests.items()
    }


def record(measured: dict[str, float], path: Path = FILE) -> None:
    """Keep the least that was ever measured of each test, and drop tests that are gone.

    The first test of a process also imports what others use, and starts servers. Delete the line of
    a test that has become slower, and measure it again.
    """
    known = durations(path)
    least = {node: min(known.get(node, seconds), seconds) for node, seconds in measured.items()}
    merged = {**known, **least}
    files: dict[str, dict[str, float]] = {}
    for node, seconds in sorted(merged.items()):
        file, name = node.split("::", 1)
        if seconds >= LEAST and exists(file, name):
            files.setdefault(file, {})[name] = round(seconds, 1)
    path.write_text(json.dumps(files, indent=1) + "\n")


def exists(file: str, name: str) -> bool:
    """Whether the file has a test function of that name, whatever its cases."""
    source = ROOT / file
    return source.exists() and f"def {name.split('[')[0]}(" in source.read_text()


def tier(item: pytest.Item, seconds: float) -> str:
    """The run that takes a test: "first", "more" or "whole"."""
    for name in ("whole", "more"):
        if item.get_closest_marker(name):
            return name
    named = item.get_closest_marker("first")
    if named:
        return "first" if not named.args or case_of(item) in named.args else "more"
    return "more" if seconds > SLOW else "first"


def case_of(item: pytest.Item) -> str:
    """The id of a parametrised test's case, or an empty text."""
    return item.name.partition("[")[2].removesuffix("]")


def stale(items: Iterable[pytest.Item]) -> list[str]:
    """Cases named by `first` that their test does not have."""
    missing: dict[str, set[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("first"):
            missing.setdefault(item.nodeid.split("[")[0], set(mark.args)).discard(case_of(item))
    return [f"{test}[{case}]" for test, cases in missing.items() for case in sorted(cases)]


def parts_of(tests: Iterable[str], seconds: Callable[[str], float]) -> dict[str, int]:
    """The part of each test, such that all parts take equally long.

    The longest test comes first, and each goes to the part that has the least until then; equally
    long ones are ordered by a checksum, which spreads the tests of a file.
    """
    sums = [0.0] * PARTS
    parts = {}
    for test in sorted(tests, key=lambda test: (-seconds(test), crc32(test.encode()), test)):
        parts[test] = sums.index(min(sums))
        sums[parts[test]] += seconds(test)
    return parts


def part_of_commit(commit: str) -> int:
    """The part that a commit runs: the same on every machine."""
    return crc32(commit.encode()) % PARTS
