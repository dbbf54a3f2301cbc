"""Rules of the tree, without exceptions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.tree import nodes, room_of, sources

pytestmark = pytest.mark.first

RECIPES = "trainer/recipes/"
TOOLS = "trainer.tools"
"""Commands beside training."""
WIDTH = 100
SMALL = re.compile(r"(^|_)(small|shrunk|shrink|shallow|reduced|copied|few)(_|$)", re.IGNORECASE)
"""Words for what is called `tiny`."""
VAGUE = {"told", "said", "asked", "seen", "mend"}
FOREIGN = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets")
DOORS = ("trainer.command", "launch")
"""What may import tools; and `trainer/__init__.py`, the commands in Python."""
PATCHES = {"patches.py", "pretend.py"}
"""Files that set attributes of libraries."""
LINEAR = {"_Product"}
"""Autograd functions that are linear in all that has a gradient, written in PyTorch's operators."""
PHASES = "trainer/supervise/stall.py"
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def called(node: ast.expr) -> str:
    """The last name of what is called or referred to."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def nothing_but_commands_imports_tools() -> Iterator[str]:
    for path, node in nodes(ast.Import, ast.ImportFrom):
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if module != "trainer" and not module.startswith((TOOLS, *DOORS)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            yield from (f"{path}: {name}" for name in names if name.startswith(TOOLS))


def one_file_composes() -> Iterator[str]:
    for path, node in nodes(ast.Call):
        if (name := called(node.func)) in (
            "resolve",
            "layout_of",
            "select",
        ) and path != "trainer/run/compose.py":
            own = path in (
                "trainer/config/resolve.py",
                "trainer/layout.py",
                "trainer/engines/__init__.py",
            )
            if not own and not (
                isinstance(node.func, ast.Attribute) and name == "resolve"
            ):  # a path's
                yield f"{path}: {name}"


def nobody_else_knows_a_recipe() -> Iterator[str]:
    """No import of one, no name of one, and no question which one it is, but in recipes themselves.

    `trainer/plugins.py` has the table of names, by which `trainer/recipe.py` finds them. A folder
    of a trained classifier has its task's name in it.
    """
    names = {"causal_lm", "image_classification", "own_module"}
    keeps_names = ("trainer/plugins.py", "trainer/config/", "trainer/models/classifiers.py")
    known = {node.name for path, node in nodes(ast.ClassDef) if path.startswith(RECIPES)}
    for path, (_, tree) in sources().items():
        if path.startswith(RECIPES):
            continue
        for module in imported(tree):
            if module.startswith("trainer.recipes"):
                yield f"{path}: {module}"
        constants_in = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        if not path.startswith(keeps_names):
            yield from (f"{path}: {node.value}" for node in constants_in if node.value in names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node.func) == "isinstance":
                requested = {called(part) for part in ast.walk(node.args[1])} & known
                yield from (f"{path}: {name}" for name in requested)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def no_two_files_of_one_name() -> Iterator[str]:
    """Beside an engine's own version of a technique in `parallel/`, and the files of recipes, which
    have the same in each.
    """
    versions = {"__init__.py", "engine.py", "state.py", "patches.py"}
    techniques = {Path(path).name for path in sources() if room_of(path) == "parallel"}
    named = [
        path
        for path in sources()
        if not room_of(path).startswith("engines") or Path(path).name not in techniques
    ]
    named = [path for path in named if path.startswith("trainer/")]
    names = Counter(Path(path).name for path in named if not path.startswith(RECIPES))
    yield from (
        f"{name}: {count} files"
        for name, count in names.items()
        if count > 1 and name not in versions
    )


def no_two_classes_of_one_name() -> Iterator[str]:
    names = Counter(node.name for _, node in nodes(ast.ClassDef))
    yield from (f"{name}: {count} classes" for name, count in names.items() if count > 1)


def a_phase_is_of_the_enum() -> Iterator[str]:
    for path, (_, tree) in sources().items():
        if path != PHASES:
            yield from (f"{path}: {text}" for text in phases_as_text(tree))


def phases_as_text(tree: ast.Module) -> Iterator[str]:
    """A phase's text where a phase is expected: what `at` is called with, or what stands beside a
    word for phases.

    In a file that knows the enum, also what is compared, assigned, or in a dictionary, whatever the
    words beside it.
    """
    from trainer.supervise.stall import Phase

    kept = (
        ast.Compare
        | ast.Assign
        | ast.AnnAssign
        | ast.Dict
        | ast.Subscript
        | ast.Return
        | ast.arguments
    )
    knows = any(
        alias.name == "Phase"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            expected = called(node.func) in ("at", "at_step", "Beat")
            parts = (
                [node]
                if expected
                else [keyword for keyword in node.keywords if keyword.arg == "phase"]
            )
        else:
            words = (
                knows or "phase" in ast.unparse(node).lower() if isinstance(node, kept) else False
            )
            parts = [node] if words else []
        yield from (
            one.value for part in parts for one in constants(part) if one.value in set(Phase)
        )


def constants(node: ast.AST) -> Iterator[ast.Constant]:
    """The constants that a node holds itself, or in a tuple, a list or a choice."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant):
            yield child
        elif isinstance(
            child, ast.Tuple | ast.List | ast.Set | ast.IfExp | ast.Starred | ast.keyword
        ):
            yield from constants(child)


@pytest.mark.parametrize(
    "line",
    [
        "watch.at('training')",
        "hooks.at_step(3, 4, phase='saving')",
        "x = phase == 'training'",
        "x = phase in ('logging', 'saving')",
        "self._phase, self._step = 'preparing', 0",
        "def f(phase='building'): pass",
        "from a import Phase\nx = ended == 'logging'",
        "from a import Phase\nx = {'evaluating': 1}",
        "from a import Phase\ndef f(): return 'saving'",
    ],
)
def test_a_phase_as_text_is_found(line: str) -> None:
    assert list(phases_as_text(ast.parse(line)))


def libraries_are_patched_in_patches() -> Iterator[str]:
    for path, (_, tree) in sources().items():
        if Path(path).name in PATCHES:
            continue
        theirs = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = (
                    node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
                )
                if any("mock" in alias.name for alias in node.names):
                    yield f"{path}: mock"
                if module.split(".")[0] in FOREIGN:
                    theirs |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        for target, text in assigned(tree):
            if isinstance(target.value, ast.Name | ast.Attribute) and text.split(".")[0] in theirs:
                yield f"{path}: {text}"


def nobody_sets_anothers_attribute() -> Iterator[str]:
    for path, (_, tree) in sources().items():
        for _, text in () if Path(path).name in PATCHES else assigned(tree):
            if text.split(".")[0] not in ("self", "cls", "sys") and not text.endswith(
                (".data", ".grad")
            ):
                yield f"{path}: {text}"


def assigned(tree: ast.AST) -> Iterator[tuple[ast.Attribute, str]]:
    """The attributes that a file assigns, of whatever object but an autograd context."""
    contexts = {id(node) for node in attributes_of_contexts(tree)}
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and id(node) not in contexts:
            yield node, ast.unparse(node)


def attributes_of_contexts(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes of an autograd `Function`'s context: torch's protocol has them assigned."""
    for function in ast.walk(tree):
        if isinstance(function, ast.ClassDef) and "Function" in map(called, function.bases):
            for method in function.body:
                protocol = isinstance(method, ast.FunctionDef) and method.name in (
                    "forward",
                    "backward",
                    "setup_context",
                )
                if protocol and "staticmethod" in map(called, method.decorator_list):
                    context = method.args.args[0].arg
                    for node in ast.walk(method):
                        if isinstance(node, ast.Attribute) and called(node.value) == context:
                            yield node


def a_backward_pass_by_hand_runs_once() -> Iterator[str]:
    """Autograd can't follow one that uses what the forward pass computed, or that tells others."""
    for path, node in nodes(ast.ClassDef):
        if "Function" in map(called, node.bases) and node.name not in LINEAR:
            [backward] = (m for m in node.body if getattr(m, "name", "") == "backward")
            by = [d.func for d in backward.decorator_list if isinstance(d, ast.Call)]
            if "differentiable_once" not in map(called, by):
                yield f"{path}: {node.name}"


def test_the_context_of_an_autograd_function_alone_is_left_out() -> None:
    source = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        group.name = "sum"

class Other:
    @staticmethod
    def forward(ctx):
        ctx.group = None
"""
    assert [text for _, text in assigned(ast.parse(source))] == ["group.name", "ctx.group"]


def a_docstring_stands_alone() -> Iterator[str]:
    for path, (_, tree) in sources().items():
        for name, text in docstrings(tree):
            if re.match(r"(What|Of|Whether|Who|Which)\b", text):
                yield f"{path}: {name}: {text.splitlines()[0]}"


def docstrings(tree: ast.AST, place: str = "") -> Iterator[tuple[str, str]]:
    """Each with the name of what it describes: a module, class, function, or what is assigned
    before it.
    """
    last = place
    for node in ast.iter_child_nodes(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield last or "module", node.value.value
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            last = f"{place}.{ast.unparse(target)}".lstrip(".")
        if isinstance(node, Node):
            yield from docstrings(node, f"{place}.{node.name}".lstrip("."))


def a_parameter_has_the_noun_of_the_thing() -> Iterator[str]:
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        yield from (f"{path}: {node.name}({arg.arg})" for arg in node.args.args if arg.arg in VAGUE)


def one_word_for_a_small_model() -> Iterator[str]:
    for path, node in nodes(ast.FunctionDef, ast.ClassDef):
        if SMALL.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name)):
            yield f"{path}: {node.name}"
    yield from (path for path in sources() if SMALL.search(Path(path).stem))


def no_line_is_wider_than_100() -> Iterator[str]:
    """Beside comments for a checker, which have to stand at the end of their line."""
    for path, (text, _) in sources().items():
        for number, line in enumerate(text.splitlines(), 1):
            if len(re.sub(r"\s*# (type: ignore|noqa).*", "", line)) > WIDTH:
                yield f"{path}: line {number}"


RULES: list[Callable[[], Iterable[str]]] = [
    no_line_is_wider_than_100,
    nothing_but_commands_imports_tools,
    one_file_composes,
    nobody_else_knows_a_recipe,
    no_two_files_of_one_name,
    no_two_classes_of_one_name,
    a_phase_is_of_the_enum,
    libraries_are_patched_in_patches,
    nobody_sets_anothers_attribute,
    a_backward_pass_by_hand_runs_once,
    a_docstring_stands_alone,
    a_parameter_has_the_noun_of_the_thing,
    one_word_for_a_small_model,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules(rule: Callable[[], Iterable[str]]) -> None:
    assert sorted(rule()) == []
