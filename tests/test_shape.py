"""The shape of the code, held: rooms and import order, no hidden waits, the README's map and table, the budget."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# room -> level; an import goes to the same room or to a lower level only
LEVELS = {
    "errors": 0,
    "seeding": 0,
    "ranks": 1,
    "signals": 1,
    "config": 1,
    "state": 1,
    "layout": 2,
    "models": 3,
    "tasks": 3,
    "data": 3,
    "optimizers": 3,
    "parallel": 4,
    "engines": 5,
    "checkpoint": 5,
    "evaluate": 6,
    "trackers": 6,
    "resume": 6,
    "loop": 7,
    "meter": 7,
    "numerics": 7,
    "describe": 7,
    "run": 8,
    "verify": 8,
}
WAITS = {"item", "tolist", "synchronize", "cpu", "numpy"}


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def room_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("trainer.") else ""


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported when the program runs: what stands under TYPE_CHECKING is left out."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "trainer")


def test_imports_point_one_way():
    wrong = []
    for path, tree in sources("trainer"):
        room = path.relative_to(ROOT / "trainer").with_suffix("").parts[0]
        if room == "__init__":
            continue
        for module in imports(tree):
            target = room_of(module)
            if target in LEVELS and target != room and LEVELS[target] >= LEVELS[room]:
                wrong.append(f"{path.relative_to(ROOT)} (level {LEVELS[room]}) imports {module} ({LEVELS[target]})")
    assert wrong == []


def test_every_file_has_a_room():
    found = {path.relative_to(ROOT / "trainer").with_suffix("").parts[0] for path, _ in sources("trainer")}
    assert found - {"__init__"} == set(LEVELS)


def test_config_and_layout_know_no_torch():
    heavy = {"torch", "transformers", "deepspeed", "datasets", "accelerate"}
    for path, tree in sources("trainer/config"):
        assert not heavy & {module.split(".")[0] for module in imports(tree)}, path
    assert not heavy & {m.split(".")[0] for m in imports(ast.parse((ROOT / "trainer/layout.py").read_text()))}


def test_nothing_in_a_step_waits_for_the_device():
    for path, tree in [*sources("trainer/engines", "trainer/parallel", "trainer/tasks")]:
        calls = [
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
        ]
        assert calls == [], path


def test_the_environment_is_read_in_two_places_only():
    for path, tree in sources("trainer"):
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if path.name != "run.py":
            assert "environ" not in names, path
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path


@pytest.mark.parametrize("name", ["utils.py", "common.py", "base.py", "helpers.py", "misc.py"])
def test_no_room_without_a_noun(name):
    assert not [path for path, _ in sources("trainer", "launch") if path.name == name]


def test_the_budget():
    """Small enough to read in a day. Blank lines cost no reading."""
    lines = {
        path: sum(bool(line.strip()) for line in path.read_text().splitlines())
        for path, _ in sources("trainer", "launch")
    }
    assert sum(lines.values()) <= 8200
    assert {str(path): count for path, count in lines.items() if count > 400} == {}


# The README against the tree and the engines


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_map_of_files_is_the_tree():
    """The README's map names every module and folder of the product, and nothing that is not there."""
    section = readme().split("## Map", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([\w/.]+)`", section, re.MULTILINE))
    rooms = {f"trainer/{path.name}{'/' if path.is_dir() else ''}" for path in (ROOT / "trainer").iterdir()}
    rooms = {room for room in rooms if "__" not in room}
    others = {"launch/", "ds_configs/", "examples/", "docs/", "tests/", "benchmarks/"}
    present = rooms | {folder for folder in others if (ROOT / folder).is_dir()}
    assert named == present


def test_the_layout_table_is_what_the_engines_say():
    from trainer.describe import layout_table, proof

    assert layout_table(proof) in readme()


def test_the_files_that_the_readme_names_are_there():
    for name in re.findall(r"\]\(([\w/.-]+)\)", readme()):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"(?:launch|ds_configs|benchmarks)/[\w-]+\.(?:py|json|sbatch|md)", readme()):
        assert (ROOT / name).exists(), name


def test_every_config_that_ships_is_in_the_readme():
    for path in (ROOT / "ds_configs").glob("*.json"):
        assert f"`{path.stem}`" in readme(), path
