"""The field's terms in the docs, in texts that users see, in docstrings and in names.

`TERMS` and `NAMES` are the stop list: words of our own, and what to write instead.

    python -m tests.test_words        # prints where code has one of them
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT

pytestmark = pytest.mark.first

TERMS = {
    r"(stands?|stood|standing) still": "hangs, makes no progress",
    r"(go|goes|went|gone|going) on\b(?! (top|both|a|the|its|disk|each|every)\b)": "resumes, continues",
    r"without a word": "silently",
    r"(?<!-)\ban own\b|(?<!your )(?<!its )(?<!'s )\bown modules?": "your own module",
    r"\bheld\b(?![- ]out)(?!/)": "frozen, local, locked, kept",
    r"\bkeepers?\b": "the node's first rank",
    r"\bborders\b": "cu_seqlens",
    r"\b(long|longer|short|shorter|packed|padded|ragged|full) rows\b|\brows? of tokens\b": "sequences",
    r"\btokens of a row\b|\brows over \d": "tokens of a sequence, context parallel n",
    r"\b(input|fewer) words\b": "vocabulary shard",
    r"\bmend(s|ed|ing)?\b": "repair, fix",
    r"\banew\b": "again, from the beginning",
    r"\bfor ever\b": "forever",
    r"\bin spite of\b": "anyway",
    r"\bmake[s]? (it|them) up\b|\bmade up\b": "completes, repeats",
    r"\bdearest\b": "most expensive",
}
"""A pattern that texts do not have, and what to write in its place."""
NAMES = {
    "told": "progress, message",
    "said": "message",
    "asked": "requested",
    "seen": "actual",
    "found": "result, or what it is",
    "held": "frozen, local, locked, heldout",
    "keeper": "node_first",
    "keepers": "node_firsts",
    "borders": "cu_seqlens",
    "mend": "hint",
}
"""A word that no part of a name is, and what to name the thing."""
GENERATED = {"reference.md", "importing.md", "families.md"}
"""Pages whose texts come from code, and are counted there."""


def pages() -> list[Path]:
    globs = ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/results/*.md", "mkdocs.yml")
    globs = (*globs, "skills/**/*.md")
    scripts = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    paths = [*scripts, *(path for glob in globs for path in ROOT.glob(glob))]
    return sorted(path for path in paths if path.name not in GENERATED)


def hits(text: str) -> list[str]:
    """Return each part of a text that the stop list has, with what to write instead."""
    flat = " ".join(text.split())
    return [
        f'"{match.group(0)}" in "...{flat[max(0, match.start() - 30) : match.end() + 20]}...": {term}'
        for pattern, term in TERMS.items()
        for match in re.finditer(pattern, flat, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_the_terms_of_the_field(page: Path) -> None:
    """Of a script the docstring, which says how to run it."""
    text = page.read_text()
    assert hits((ast.get_docstring(ast.parse(text)) or "") if page.suffix == ".py" else text) == []


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node introduces: of functions, classes, parameters and variables."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def parts_of(name: str) -> list[str]:
    """Split a name into its words; what is held out is for evaluation, `found_inf` is PyTorch's."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return re.sub("held_out|found_inf", "", words).split("_")


def hits_of_code(path: Path) -> list[str]:
    """Return the hits in a module's strings, docstrings included, and in the names it introduces."""
    result = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            result += [f"line {node.lineno}: {hit}" for hit in hits(node.value)]
        for name in names_of(node):
            result += [
                f"line {getattr(node, 'lineno', 0)}: the name {name}: {NAMES[part]}"
                for part in parts_of(name)
                if part in NAMES
            ]
    return result


def modules() -> list[Path]:
    folders = ("meshloom", "trainer", "launch")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_code_has_the_terms_of_the_field() -> None:
    every = [f"{path.relative_to(ROOT)}: {hit}" for path in modules() for hit in hits_of_code(path)]
    assert not every, "\n".join(every)


def test_the_stop_list_finds_what_it_is_for() -> None:
    ours = "The run goes on, without a word, with long\nrows."
    fields = "It resumes; a held-out sample goes on top; rows of a matrix."
    assert hits(ours) and not hits(fields)


if __name__ == "__main__":
    for module in modules():
        for one in hits_of_code(module):
            print(f"{module.relative_to(ROOT)}: {one}")
