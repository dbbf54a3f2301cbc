"""Texts that users see, kept in one file, so that a diff shows every sentence that has changed.

A test names the class of an error, its exit code, its place and a key word; `shows`, `shows_each`
and `raises` record the whole text beside the test's node id. `tests/messages.txt` has all of them.
`python -m pytest --rewrite-messages`, with any choice of tests, rewrites what those tests record.
Where a text differs from the file, no test fails: a sentence may be bettered without one. The end of
the run says how many differ, and the diff of the file shows them.
"""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.selection import ROOT, exists

FILE = ROOT / "tests" / "messages.txt"
HEAD = "Written by `python -m pytest --rewrite-messages`: what users see, by the test that sees it."
RECORDED: list[str] = []
"""The texts that the current test has recorded."""
TEMPORARY = re.escape(tempfile.gettempdir())
VARIES = [
    (r"Traceback \(most recent call last\):\n(?: +.*\n)+", "TRACEBACK\n"),
    (re.escape(str(ROOT)), "ROOT"),
    (rf"{TEMPORARY}/pytest-of-\w+/pytest-\d+(/popen-gw\d+)?/[\w.-]+", "TMP"),
    (rf"{TEMPORARY}/\w+", "TMP"),
    (rf"\b{re.escape(socket.gethostname())}\b", "HOST"),
    (r"\bHOST, \d+", "HOST, N"),
    (r"\b\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\b", "DATE"),
    (r"(No space left on device, )[\d.]+ \w+", r"\1N GiB"),
    (r"\b\d{3,} bytes", "N bytes"),
    (r"\b([0-9a-f]{32,}\b|[0-9a-f]{12}\.\.\.)", "HASH"),
    (r"\[\d{3,}\]", "[N]"),
    (r"\bmeshloom-\d+\b", "meshloom-USER"),
    (r"\b(process|pid) \d+", r"\1 N"),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:PORT"),
    (r"(?<![\w.])\d+(\.\d+)?( s\b| min\b)", r"N\2"),
    (r"\d\.\d+e[+-]\d+", "FLOAT"),
]
"""What differs between machines and runs, and what stands for it."""


def shows(text: object, *keys: str) -> str:
    """Record the part of a text that a user sees, and check that it has the key words.

    Returns that part: the first line that has all of them. If no line has all, it is the lines
    that have any. Raises AssertionError if a key word is missing from the text.
    """
    part = part_with(str(text), keys)
    keep(part)
    return part


def part_with(text: str, keys: tuple[str, ...]) -> str:
    """The first line with all key words, or else the lines with any. See `shows`."""
    missing = [key for key in keys if key not in text]
    assert not missing, f"{missing} are missing from:\n{text}"
    lines = text.splitlines()
    with_all = [line for line in lines if all(key in line for key in keys)]
    with_any = [line for line in lines if any(key in line for key in keys)]
    return with_all[0] if with_all else "\n".join(with_any) or text


def shows_each(texts: Iterable[object], *keys: str | tuple[str, ...]) -> None:
    """Record each of several texts, and check that there is one for each key word or words."""
    given = [str(text) for text in texts]
    assert len(given) == len(keys), "\n".join(given)
    for text, words in zip(given, keys, strict=True):
        shows(text, *((words,) if isinstance(words, str) else words))


@contextmanager
def raises(kind: type[BaseException], *keys: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Check that the block raises this class with these key words, and record the text.

    Of a text that holds a traceback it is the part that `shows` would record.
    """
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    part = part_with(text, keys)
    keep(part if "Traceback" in text else text)


def keep(text: str) -> None:
    """Record a text for the current test, once."""
    if (known := normalised(text)) not in RECORDED:
        RECORDED.append(known)


def normalised(text: str) -> str:
    """The text without what differs between machines and runs."""
    for pattern, name in VARIES:
        text = re.sub(pattern, name, text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def changed(recorded: dict[str, list[str]]) -> list[str]:
    """The tests whose texts are in the file, and are others now."""
    known = written()
    return [node for node, texts in recorded.items() if node in known and texts != known[node]]


def written(path: Path = FILE) -> dict[str, list[str]]:
    """The texts of each test, by its node id, in the order in which it records them."""
    tests: dict[str, list[str]] = {}
    for block in path.read_text().split("\n\n")[1:]:
        texts: list[str] = []
        for line in block.splitlines():
            if line.startswith("  - "):
                texts.append(line[4:])
            elif line.startswith("    "):
                texts[-1] += "\n" + line[4:]
            else:
                tests[line] = texts
    return tests


def rewrite(recorded: dict[str, list[str]], path: Path = FILE) -> None:
    """Replace the texts of the tests that have run, and drop tests that are gone.

    Cases of a test that record the same texts stand above them together.
    """
    tests = {**written(path), **recorded}
    blocks: dict[tuple[str, ...], list[str]] = {}
    for node, texts in sorted(tests.items()):
        function = node.partition("[")[0]
        if texts and exists(*node.split("::", 1)):
            blocks.setdefault((function, *texts), []).append(node)
    parts = [[HEAD], *([*nodes, *lines_of(list(texts))] for (_, *texts), nodes in blocks.items())]
    path.write_text("\n\n".join("\n".join(part) for part in parts) + "\n")


def lines_of(texts: list[str]) -> list[str]:
    """The lines of the file for a test's texts."""
    return [
        ("    " if number else "  - ") + line
        for text in texts
        for number, line in enumerate(text.splitlines() or [""])
    ]
