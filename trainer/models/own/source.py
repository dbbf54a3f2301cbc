"""Digests of the source of a user's model, loss and optimizer: they show edits between two runs."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import FunctionType, MethodType, ModuleType

from torch import nn

_INSTALLED = ("site-packages", "dist-packages")
Made = Callable[..., object] | type | None


def source_of(model: nn.Module, /, **parts: Made) -> dict[str, str]:
    """Return digests, by name, of the statements that define the user's classes in the model.

    These are the classes and functions at the top level of the user's files, and all that they need
    by name, in the same files and in the user's other files. `parts`, such as a loss, are treated
    alike. Comments, docstrings and white space do not count. Nor do values that a program computes,
    except plain arguments of a `functools.partial`. For a class of an installed package, the result
    has the package's version.
    """
    sources = _Sources()
    for kind in dict.fromkeys(map(type, model.modules())):
        sources.add(kind.__qualname__, kind)
    for name, part in parts.items():
        sources.add(name, part)
    return {name: _digest(*sorted(texts)) for name, texts in sources.texts.items()} | (
        sources.versions
    )


class _Sources:
    """The statements that were read, each once."""

    def __init__(self) -> None:
        self.texts: dict[str, set[str]] = {}
        self.versions: dict[str, str] = {}
        self._visited: set[tuple[str, str]] = set()

    def add(self, role: str, thing: object) -> None:
        """Add what defines a class or a function; for any other object, what defines its class."""
        given = thing
        while isinstance(thing, partial | MethodType):
            if isinstance(thing, partial):
                values = [*thing.args, *sorted(thing.keywords.items())]
                self._add_text(f"{role}'s arguments", ", ".join(map(_text_of, values)))
            thing = thing.func if isinstance(thing, partial) else thing.__func__
        thing = inspect.unwrap(thing) if callable(thing) else thing
        kind = thing if isinstance(thing, FunctionType | type) else type(thing)
        module = sys.modules.get(kind.__module__)
        if module is None or not self._is_own(module):
            return
        for known in _statements(module):  # such as `loss = loss_of(3.0)`
            if vars(module).get(known) is given:
                self._follow(module, known)
        name = kind.__qualname__.partition(".")[0]
        if name == "<lambda>" and isinstance(kind, FunctionType):
            for text in _lambdas(module, kind.__code__.co_firstlineno):
                self._add_text(role, text)
        elif name in _statements(module):
            self._follow(module, name)
        else:  # typed in a notebook: each cell is a file of its own
            try:
                self._add_text(name, _plain(ast.parse(inspect.getsource(kind))))
            except (OSError, TypeError, SyntaxError):  # `python -c`: nothing is known
                return

    def _follow(self, module: ModuleType, name: str) -> None:
        """Add the top-level statement that defines a name, and the statements that it needs."""
        if (module.__name__, name) in self._visited:
            return
        self._visited.add((module.__name__, name))
        statement = _statements(module).get(name)
        if isinstance(statement, ast.Import | ast.ImportFrom) or statement is None:
            self._follow_import(vars(module).get(name))
            return
        self._add_text(name, _plain(statement))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in _statements(module):
                self._follow(module, node.id)

    def _follow_import(self, value: object) -> None:
        if isinstance(value, ModuleType):
            if self._is_own(value):
                for name in _statements(value):
                    self._follow(value, name)
        elif isinstance(value, FunctionType | type):
            self.add(value.__qualname__, value)

    def _add_text(self, name: str, text: str) -> None:
        self.texts.setdefault(name, set()).add(text)

    def _is_own(self, module: ModuleType) -> bool:
        """Return True for a user's file; record the version of an installed package."""
        root = module.__name__.partition(".")[0]
        if root == "trainer" or (root in sys.stdlib_module_names and root != "__main__"):
            return False
        file = getattr(module, "__file__", None) or ""
        if not any(part in Path(file).parts for part in _INSTALLED):
            return True
        if root not in _KNOWN:
            for package in packages_distributions().get(root, []):
                self.versions[f"package {package}"] = version(package)
        return False


_KNOWN = {"torch", "transformers", "torchvision", "numpy", "deepspeed", "accelerate", "peft"}
"""Packages whose versions a checkpoint has anyway, or that define no model."""


@cache
def _tree(file: str, changed: int) -> ast.Module:
    """Parse a file once for each modification time `changed`, in ns."""
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _parsed(module: ModuleType) -> ast.Module:
    """Return a module's syntax tree; an empty one if its file can't be read or parsed."""
    file = getattr(module, "__file__", None)
    try:
        return _tree(file, Path(file).stat().st_mtime_ns) if file else ast.parse("")
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.parse("")


def _statements(module: ModuleType) -> dict[str, ast.stmt]:
    """Map each name at the top level of a file to the last statement that defines it."""
    return {name: node for node in _parsed(module).body for name in _names(node)}


def _names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):  # inside an `if` or a `try`
            yield node.name


def _lambdas(module: ModuleType, line: int) -> Iterator[str]:
    """Yield the source of each lambda that begins on a line."""
    for node in ast.walk(_parsed(module)):
        if isinstance(node, ast.Lambda) and node.lineno == line:
            yield _plain(node)


def _plain(tree: ast.AST) -> str:
    """Return the source without comments and docstrings."""
    tree = deepcopy(tree)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(body, list) and isinstance(first, ast.Expr):
            is_docstring = isinstance(first.value, ast.Constant)
            body[:1] = [ast.Pass()] if is_docstring else [first]
    return ast.unparse(tree)


def _text_of(value: object) -> str:
    """Return a plain value as text; for any other object, its class."""
    if isinstance(value, dict):
        value = sorted(value.items(), key=str)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text_of, value))}]"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest(*texts: str) -> str:
    return f"sha256 {hashlib.sha256(repr(texts).encode()).hexdigest()[:16]}"
