"""Rules of the tests themselves, without exceptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import messages
from tests.support.selection import ROOT, exists

MOST_WORDS = 4
"""What a test checks has at most as many words; more make it a sentence."""
HELPERS = ("shows", "shows_each", "raises")
EXPECTED = {
    "text",
    "message",
    "expected",
    "seen",
    "reason",
    "last",
    "words",
    "keys",
    "key",
    "place",
}
"""Parameters of tests that hold what a user is to see."""


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each test file, by its path."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }


def checked_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines and texts of what a test checks.

    They stand in an assert, as `match=`, as key words, or in a table of `parametrize`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            checked: list[ast.AST] = [node]
        elif isinstance(node, ast.keyword) and node.arg == "match":
            checked = [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in HELPERS:
            checked = list(node.args[1:])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
            checked = list(expected_cells(node))
        else:
            continue
        for part in checked:
            for text in ast.walk(part):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.lineno, text.value


def expected_cells(call: ast.Call) -> Iterator[ast.AST]:
    """The cells of a table of `parametrize` that hold what a user is to see."""
    names = ast.literal_eval(call.args[0])
    columns = re.split(", *", names) if isinstance(names, str) else list(names)
    rows = call.args[1].elts if isinstance(call.args[1], ast.List) else []
    for row in rows:
        cells = row.elts if isinstance(row, ast.Tuple) else getattr(row, "args", [])
        if len(columns) == 1:
            cells = [row]
        if len(cells) == len(columns):
            yield from (cells[n] for n, column in enumerate(columns) if column in EXPECTED)


def is_sentence(text: str) -> bool:
    words = [word for word in text.split() if re.fullmatch(r"[^\W\d][\w'-]+[.,;:?!]*", word)]
    return len(words) > MOST_WORDS


def test_no_sentence_is_in_an_assert():
    results = [
        f"{path}:{line}: {text}"
        for path, tree in trees().items()
        for line, text in checked_texts(tree)
        if is_sentence(text)
    ]
    assert results == [], "see tests/support/messages.py"


def test_a_sentence_is_found():
    source = """
assert error == "it is as it was", "so it is not yet"
with pytest.raises(E, match="it is as it was"): ...
shows(x, "it is as it was")
y = "it is as it was"
pytest.mark.parametrize(("x", "text"), [("not as it was, is it", "it is as it was")])
"""
    results = [text for _, text in checked_texts(ast.parse(source)) if is_sentence(text)]
    assert len(results) == 5


IMPORTED = re.compile(r"^ *(?:from|import) (tests(?:\.\w+)*)(?: import (\w+))?", re.M)


def foreign_imports(source: str) -> list[str]:
    """The imports of other test files, also in a program that a test holds as text."""
    imported = [".".join(filter(None, result)) for result in IMPORTED.findall(source)]
    return [module for module in imported if not module.startswith("tests.support")]


def test_no_test_imports_from_another():
    paths = sorted((ROOT / "tests").rglob("*.py"))
    results = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in paths
        for module in foreign_imports(path.read_text())
    ]
    assert results == [], "see tests/support"


def test_an_import_of_another_test_is_found():
    lines = ["from %s.run.test_x import y", "    import %s.run", "from %s.run import test_x"]
    source = "\n".join([*lines, "from %s.support import pool", "from %s import support"])
    assert len(foreign_imports(source.replace("%s", "tests"))) == 3


def test_each_recorded_text_is_of_a_test_that_exists():
    assert [node for node in messages.written() if not exists(*node.split("::", 1))] == []


def test_a_rewrite_keeps_the_texts_of_other_tests_and_drops_those_that_are_gone(tmp_path: Path):
    path = tmp_path / "messages.txt"
    here = "tests/test_rules_of_tests.py::test_a_sentence_is_found"
    other = "tests/test_rules_of_tests.py::test_no_sentence_is_in_an_assert[a b]"
    path.write_text("\n".join(["head", "", "tests/test_gone.py::test", "  - x", ""]))
    messages.rewrite({other: ["one\n  two", "three"], here: ["four"]}, path)
    messages.rewrite({here: ["five"]}, path)
    assert messages.written(path) == {other: ["one\n  two", "three"], here: ["five"]}


def test_what_differs_between_runs_is_hidden(tmp_path: Path):
    shown = messages.normalised(f"{tmp_path}/a: process 123, 17 s ago, 48 steps, 3 GiB")
    assert shown.split(", ") == ["TMP/a: process N", "N s ago", "48 steps", "3 GiB"]
