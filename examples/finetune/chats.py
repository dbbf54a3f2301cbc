"""Chats out of Python's standard library: a function's signature and docstring, answered by its body."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def chats() -> Iterator[dict]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        for node in functions:
            said = ast.get_docstring(node)
            if said and len(node.body) > 1:
                body = "\n".join(ast.unparse(statement) for statement in node.body[1:])
                asked = f"def {node.name}({ast.unparse(node.args)}): {said.splitlines()[0]}"
                yield {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": body}]}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    rows = list(chats())
    held = rows[::50]
    for name, part in (("chats.jsonl", [row for row in rows if row not in held]), ("held.jsonl", held)):
        (target / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{len(part):,} chats in {target / name}")
