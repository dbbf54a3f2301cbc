"""Digests, by name, of the code that a model and its loss run: they show edits of it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from functools import cache, partial
from importlib.metadata import packages_distributions, version
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from trainer.models.names import pattern_of
from trainer.models.own.python_state import LONGEST, captured, is_library, parts_of, plain

SHORT = 60
"""The most characters of a value that is kept as it is."""
_INSTALLED = ("site-packages", "dist-packages")


def code_of(model: nn.Module, /, **given: Any) -> dict[str, str]:
    """Return digests of the source of the user's classes in the model, and of what they call.

    Functions in `given` are included, and so are plain values from closures, defaults and globals.
    If `model` is given, it is the user's own: classes and plain attributes of all submodules are
    included, too. Comments and docstrings do not count.
    """
    found, visited = dict[str, str](), set[int]()
    for name, thing in given.items():
        _note(name, thing, found, visited)
    values: dict[str, list[str]] = {}
    for place, module in model.named_modules():
        _note(type(module).__qualname__, type(module), found, visited)
        pattern = pattern_of(place) or "model"
        values.setdefault(f"{pattern}'s class", []).append(type(module).__qualname__)
        for key, value in vars(module).items():
            if callable(value) and not isinstance(value, nn.Module):  # a forward, an activation
                _note(f"{pattern}.{key}", value, found, visited)
            elif key.endswith("_hooks") and not isinstance(value, set):
                for hook in value.values():
                    _note(f"{pattern}.{key}", hook, found, visited)
            elif key[:1] != "_" and key != "training" and (text := _text(value)) is not None:
                values.setdefault(f"{pattern}.{key}", []).append(text)
    if "model" in given:
        for key, texts in values.items():
            found[key] = _short(texts[0] if len(set(texts)) == 1 else " ".join(texts))
    return found


def _note(name: str, thing: Any, found: dict[str, str], visited: set[int]) -> None:
    """Add the user's own code, with what it takes from elsewhere."""
    if isinstance(thing, partial):
        _add(found, f"{name}'s arguments", _text((thing.args, thing.keywords)))
        _note(name, thing.func, found, visited)
    elif isinstance(thing, MethodType):
        _note(name, thing.__func__, found, visited)
    elif isinstance(thing, (FunctionType, type)):
        own = name if thing.__name__ == "<lambda>" else thing.__qualname__
        _note_code(own, thing, found, visited)
    elif callable(thing) and not is_library(type(thing)):
        _add(found, f"{name}'s values", _text(vars(thing)) if hasattr(thing, "__dict__") else None)
        _note(type(thing).__qualname__, type(thing), found, visited)


def _note_code(name: str, thing: Any, found: dict[str, str], visited: set[int]) -> None:
    if is_library(thing) or id(thing) in visited:
        return
    visited.add(id(thing))
    _add(found, name, _source(thing), 0)
    if _is_installed(thing):  # not followed further
        root = thing.__module__.partition(".")[0]
        for package in packages_distributions().get(root, []):
            found[f"package {package}"] = version(package)
    members = [*vars(thing).values(), *thing.__bases__] if isinstance(thing, type) else [thing]
    for member in members:
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(function, type):
            _note_code(function.__qualname__, function, found, visited)
        elif isinstance(function, FunctionType):
            for key, value in captured(function):
                if not isinstance(value, (FunctionType, type)):
                    _add(found, f"{name}: {key}", _text(value))
                elif not _is_installed(value):
                    _note(f"{name}: {key}", value, found, visited)


def _is_installed(thing: Any) -> bool:
    """Return True for code of an installed package, whose functions are not followed."""
    try:
        return any(part in (inspect.getsourcefile(thing) or "") for part in _INSTALLED)
    except (TypeError, OSError) as error:
        return isinstance(error, TypeError)  # else it was typed, or given by `python -c`


def _add(found: dict[str, str], name: str, text: str | None, most: int = SHORT) -> None:
    """Add a value under a name; values of one name, such as lambdas, are joined."""
    short = None if text is None else _short(text, most)
    if short is not None and short not in found.get(name, ""):
        found[name] = f"{found[name]} {short}" if name in found else short


def _short(text: str, most: int = SHORT) -> str:
    return text if len(text) <= most else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _text(value: Any, depth: int = 0) -> str | None:
    """Return plain data as text; None for anything else."""
    kinds = (list, tuple, set, frozenset, dict, SimpleNamespace)
    data = isinstance(value, kinds) or is_dataclass(type(value))
    if (text := plain(value)) is not None or not data or depth > 5:
        return text
    if getattr(value, "__len__", int)() > LONGEST:
        return None
    parts = ((re.sub(" at 0x[0-9a-f]+", "", place), part) for place, part in parts_of(value))
    return str([(place, _text(part, depth + 1)) for place, part in parts])


def _source(thing: Any) -> str:
    """Return the source without comments and docstrings; the bytecode of code without a source."""
    try:
        if thing.__name__ == "<lambda>":
            tree = _lambda(thing.__code__)
        else:
            tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
            if getattr(tree.body[0], "name", "") != thing.__name__:
                raise LookupError  # Python 3.13 takes the lines of another file for a typed class
    except (OSError, TypeError, SyntaxError, LookupError):
        functions = vars(thing).values() if isinstance(thing, type) else [thing]
        return " ".join(_bytecode(f.__code__) for f in functions if isinstance(f, FunctionType))
    for node in ast.walk(tree):
        body: Any = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return ast.unparse(tree)


@cache
def _file(text: str) -> ast.AST:
    return ast.parse(text)


def _lambda(code: CodeType) -> ast.AST:
    """Parse the lambda alone, without the statement that it stands in. Raises LookupError."""
    spots = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    around = [
        node
        for node in ast.walk(_file("".join(inspect.findsource(code)[0])))
        if isinstance(node, ast.Lambda)
        and all(_start(node.body) <= spot <= _end(node.body) for spot in spots)
    ]
    if not spots or not around:
        raise LookupError
    return max(around, key=_start)


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _bytecode(code: CodeType) -> str:
    values = code.co_consts
    constants = [_bytecode(v) if isinstance(v, CodeType) else repr(v) for v in values]
    return f"{code.co_code.hex()} {constants} {code.co_names}"
