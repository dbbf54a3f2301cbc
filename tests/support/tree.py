"""The product's files as text and syntax trees, for the tests of its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@cache
def sources() -> dict[str, tuple[str, ast.Module]]:
    """The product's files: text and tree by their path."""
    paths = [
        path for folder in ("trainer", "launch") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return {
        str(path.relative_to(ROOT)): (path.read_text(), ast.parse(path.read_text()))
        for path in paths
    }


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    for path, (_, tree) in sources().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kinds))


def room_of(path: str) -> str:
    """The folder or the file in `trainer/`; a folder in a room is a room of its own."""
    parts = Path(path).with_suffix("").parts
    return "/".join(parts[1 : max(2, len(parts) - 1)]) if parts[0] == "trainer" else parts[0]
