"""Rules 4 and 6 of the tree: sizes with room to spare, and statements that say one thing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support.tree import nodes, room_of, sources

pytestmark = pytest.mark.first

MOST_LINES = 50
"""Of a function."""
MOST_PARAMETERS = 6
MOST_FIELDS = 12
MOST_LINES_OF_A_FILE = 350
MOST_FILES = 14
"""Of a room."""


def long_functions() -> Iterator[str]:
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if node.end_lineno - node.lineno + 1 > MOST_LINES:
            yield f"{path}: {node.name}"


def many_parameters() -> Iterator[str]:
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        count = len(names) + len(node.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
        if count > MOST_PARAMETERS:
            yield f"{path}: {node.name}"


def many_fields() -> Iterator[str]:
    for path, node in nodes(ast.ClassDef):
        if sum(isinstance(line, ast.AnnAssign) for line in node.body) > MOST_FIELDS:
            yield f"{path}: {node.name}"


def long_files() -> Iterator[str]:
    for path, (text, _) in sources().items():
        if len(text.splitlines()) > MOST_LINES_OF_A_FILE:
            yield path


def full_rooms() -> Iterator[str]:
    for room, count in Counter(room_of(path) for path in sources()).items():
        if count > MOST_FILES:
            yield room


def conditionals_inside_another() -> Iterator[str]:
    for path, node in nodes(ast.IfExp):
        if any(isinstance(part, ast.IfExp) for part in ast.walk(node) if part is not node):
            yield f"{path}: {ast.unparse(node)}"


def lambdas_that_throw_a_value_away() -> Iterator[str]:
    """As `lambda: call() and None` does."""
    for path, node in nodes(ast.Lambda):
        body = node.body
        if isinstance(body, ast.BoolOp) and isinstance(body.values[-1], ast.Constant):
            yield f"{path}: {ast.unparse(node)}"


def zips_that_align() -> Iterator[str]:
    for path, node in nodes(ast.keyword):
        if node.arg == "strict" and ast.unparse(node.value) == "False":
            yield path


def unrelated_values() -> Iterator[str]:
    for path, node in nodes(ast.Assign):
        if is_unrelated(node):
            yield f"{path}: {ast.unparse(node)}"


def is_unrelated(node: ast.Assign) -> bool:
    """Return True if one statement for each target would do the same.

    It would not where a later value reads an earlier target, as in a swap and in `a, b = b, a + b`,
    nor where one call's result is taken apart.
    """
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    taken_apart = (ast.Starred, ast.Tuple, ast.List)
    if any(isinstance(part, taken_apart) for part in target.elts):
        return False
    if any(isinstance(part, ast.Starred) for part in node.value.elts):
        return False
    bound: set[str] = set()
    for name, value in zip(target.elts, node.value.elts, strict=True):
        read = {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}
        if read & bound:
            return False
        bound.add(ast.unparse(name))
    return True


RULES: list[Callable[[], Iterator[str]]] = [
    long_functions,
    many_parameters,
    many_fields,
    long_files,
    full_rooms,
    conditionals_inside_another,
    lambdas_that_throw_a_value_away,
    zips_that_align,
    unrelated_values,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules(rule: Callable[[], Iterator[str]]) -> None:
    assert list(rule()) == []


@pytest.mark.parametrize(
    ("line", "unrelated"),
    [
        ("a, b = 1, 2", True),
        ("self.a, self.b = a, b", True),
        ("a, b = b, a", False),
        ("a, b = b, a + b", False),
        ("a, b = f()", False),
        ("(a, b), c = f(), 1", False),
        ("a, *b = x, *y", False),
    ],
)
def test_what_is_unrelated(line: str, unrelated: bool) -> None:
    (node,) = ast.parse(line).body
    assert isinstance(node, ast.Assign)
    assert is_unrelated(node) is unrelated
