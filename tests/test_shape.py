"""The shape of the code: rooms and import order, no hidden waits, the docs' map and table."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.tree import sources as all_sources

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.first

# room -> level; an import goes to the same room or to a lower level only
LEVELS = {
    "errors": 0,
    "plugins": 1,
    "storage": 1,
    "distributed": 2,
    "config": 2,
    "supervise": 3,
    "state": 3,
    "layout": 3,
    "models": 4,
    "probes": 5,
    "trackers": 5,
    "tasks": 6,
    "data": 7,
    "optim": 7,
    "parallel": 8,
    "engines": 9,
    "checkpoint": 9,
    "recipe": 10,
    "run": 11,
    "certify": 12,
    "tools": 12,
    "recipes": 13,
    "command": 14,
}
WAITS = {"item", "tolist", "synchronize", "cpu", "numpy"}


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for path, (_, tree) in all_sources().items():
        if path.startswith(tuple(f"{folder}/" for folder in folders)):
            yield ROOT / path, tree


def room_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("trainer.") else ""


def imports(tree: ast.Module) -> Iterator[str]:
    """All modules that a file names, also for type checkers alone and inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module != "trainer":
                yield node.module
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if node.module == "trainer"
            )


def test_imports_point_one_way():
    wrong = []
    for path, tree in sources("trainer"):
        room = path.relative_to(ROOT / "trainer").with_suffix("").parts[0]
        if room == "__init__":
            continue
        for module in imports(tree):
            target = room_of(module)
            if module == "trainer" or (module.startswith("trainer.") and target not in LEVELS):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}, which is above all rooms")
            if target in LEVELS and target != room and LEVELS[target] >= LEVELS[room]:
                wrong.append(
                    f"{path.relative_to(ROOT)} (level {LEVELS[room]}) imports {module} "
                    f"({LEVELS[target]})"
                )
    assert wrong == []


def test_no_circle_within_a_room():
    """Of files: a room may be entered from below only, and walked through in one direction."""
    named = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): tree
        for path, tree in sources("trainer")
    }
    edges = {
        name: {module for module in imports(tree) if module in named}
        for name, tree in named.items()
    }
    while free := [name for name, needs in edges.items() if not needs & edges.keys() - {name}]:
        for name in free:
            del edges[name]
    assert sorted(edges) == []


def test_every_library_that_is_imported_is_declared():
    """As a dependency or of an extra: what another library brings along today may be gone
    tomorrow.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    declared = {re.split(r"[<>=\[ ;]", line)[0].lower().replace("_", "-") for line in lines}
    offered = packages_distributions()
    for path, tree in sources("trainer", "launch"):
        for name in (
            {module.split(".")[0] for module in imports(tree)}
            - sys.stdlib_module_names
            - {"trainer"}
        ):
            results = {one.lower().replace("_", "-") for one in offered.get(name, [name])}
            assert results & declared, f"{path.relative_to(ROOT)} imports {name}, of {results}"


def test_every_file_has_a_room():
    results = {
        path.relative_to(ROOT / "trainer").with_suffix("").parts[0]
        for path, _ in sources("trainer")
    }
    assert results - {"__init__"} == set(LEVELS)
    loose = {path.name for path in (ROOT / "trainer").glob("*.py")}
    assert loose == {
        "__init__.py",
        "errors.py",
        "layout.py",
        "plugins.py",
        "recipe.py",
        "state.py",
        "storage.py",
    }


DIALECT = {
    *(
        "Grid",
        "Trainee",
        "OneByOne",
        "Copies",
        "Anatomy",
        "Inlet",
        "Feed",
        "Piece",
        "Passes",
        "Staged",
        "Facts",
    ),
    *(
        "own_part",
        "part_at",
        "place_of",
        "homes",
        "shelf",
        "modern",
        "modernise",
        "anatomy",
        "inlet",
        "trainee",
    ),
    *("grid_of", "prove_units", "prove_replicas"),
}


def test_the_words_are_those_of_the_field():
    """docs/glossary.md has the words in use; these were ours alone."""
    for path, tree in sources("trainer", "launch"):
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        names |= {
            node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert not names & DIALECT, path


def test_what_is_reduced_over_is_named_and_never_divided_out():
    """Which ranks see equal targets is known to `parallel/parallel_mesh.py` alone."""
    for path, tree in sources("trainer/engines", "trainer/parallel"):
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(
                node.op, ast.Div | ast.FloorDiv
            ):
                divisor = node.right if isinstance(node, ast.BinOp) else node.value
                results = {n.attr for n in ast.walk(divisor) if isinstance(n, ast.Attribute)}
                assert not results & {"tensor", "replicate", "shard", "world_size", "data_ranks"}, (
                    path,
                    node.lineno,
                )


def test_config_and_layout_know_no_torch():
    heavy = {"torch", "transformers", "deepspeed", "datasets", "accelerate"}
    importers = [
        (path, tree)
        for path, tree in sources("trainer/tools/importers")
        if path.stem != "deepspeed_checkpoint"
    ]
    for path, tree in [*sources("trainer/config"), *importers]:
        assert not heavy & {module.split(".")[0] for module in imports(tree)}, path
    assert not heavy & {
        m.split(".")[0] for m in imports(ast.parse((ROOT / "trainer/layout.py").read_text()))
    }


def test_nothing_in_a_step_waits_for_the_device():
    for path, tree in [*sources("trainer/engines", "trainer/parallel", "trainer/tasks")]:
        calls = [
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in WAITS
        ]
        # lengths of documents, for layers with state alone; how many tokens an expert gets
        assert calls == (["tolist"] if path.stem in ("expert_ranks", "mixers") else []), path


def test_the_environment_is_read_where_processes_start_only():
    for path, tree in sources("trainer"):
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        parts = path.relative_to(ROOT / "trainer").parts
        if parts[0] not in ("supervise", "run", "command", "certify") and parts[:2] != (
            "tools",
            "planner",
        ):
            assert "environ" not in names, path
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path


@pytest.mark.parametrize("name", ["utils.py", "common.py", "base.py", "helpers.py", "misc.py"])
def test_no_room_without_a_noun(name):
    assert not [path for path, _ in sources("trainer", "launch") if path.name == name]


def test_no_file_is_too_long():
    """Blank lines cost no reading."""
    lines = {
        path: sum(bool(line.strip()) for line in path.read_text().splitlines())
        for path, _ in sources("trainer", "launch")
    }
    assert {str(path): count for path, count in lines.items() if count > 350} == {}


# The README and the docs against the tree and the engines


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_readme_is_read_in_five_minutes():
    assert len(text_of("README.md").split()) <= 1200


def test_the_map_of_files_is_the_tree():
    """CONTRIBUTING.md's map names every room and folder, and nothing that is not there."""
    section = text_of("CONTRIBUTING.md").split("## Map", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([\w/.]+)`", section, re.MULTILINE))
    rooms = {
        f"trainer/{path.name}{'/' if path.is_dir() else ''}"
        for path in (ROOT / "trainer").iterdir()
    }
    rooms = {room for room in rooms if "__" not in room}
    others = {"meshloom", "launch", "ds_configs", "examples", "docs", "tests", "benchmarks"}
    others |= {"skills"}
    unnamed = {"trainer/ds_configs/", "trainer/py.typed"}  # a link, and a marker
    present = (rooms - unnamed) | {f"{folder}/" for folder in others}
    assert named == present


def test_the_layout_table_is_what_the_engines_say():
    from trainer.run.describe import layout_table

    assert layout_table() in text_of("docs/engines.md")


PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_files_that_a_page_names_are_there(page):
    text = text_of(page)
    for name in re.findall(r"\]\((?!\.\./\.\./actions/)([\w/.-]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / page.parent / name).exists(), name
    for name in re.findall(r"(?:launch|ds_configs|benchmarks)/[\w-]+\.(?:py|json|sbatch|md)", text):
        assert (ROOT / name).exists(), name


def test_the_files_that_contributing_names_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:trainer|tests|launch|docs)/[\w/.]*)`", text) + re.findall(
        r"\]\(([\w/.]+)", text
    ):
        assert (ROOT / name).exists(), name


def test_the_glossary_names_classes_and_files_that_are_there():
    text = (ROOT / "docs" / "glossary.md").read_text()
    for name in re.findall(r"`(trainer/[\w/.]*)`", text):
        assert (ROOT / name).exists(), name
    members: dict[str, set[str]] = {}
    for _, tree in sources("trainer"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {line.name for line in node.body if isinstance(line, ast.FunctionDef)}
                fields = {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
                members.setdefault(node.name, set()).update(names | fields)
    for name, member in re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", text):
        assert name in members, name
        assert not member or member in members[name], f"{name}.{member}"


def test_the_tests_have_the_rooms_of_the_product():
    rooms = {
        path.name
        for folder in ("trainer", "trainer/tools")
        for path in (ROOT / folder).iterdir()
        if path.is_dir()
    }
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders - {"budgets", "conformance"} <= rooms


def test_every_config_that_ships_is_in_the_docs():
    for path in (ROOT / "ds_configs").glob("*.json"):
        assert f"`{path.stem}`" in text_of("docs/configs.md"), path


DATED = re.compile(r"(Committed in|Measured at) `[0-9a-f]{7}` \(\d{4}-\d\d-\d\d\)")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("*.md")), ids=lambda path: path.stem
)
def test_each_table_of_figures_names_commit_and_date(path):
    for table in re.findall(r"(?:^\|.*\n)+\n*(.*)", path.read_text(), re.MULTILINE):
        assert DATED.match(table), table
