"""Importing a module changes no library: what is patched is patched by a call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import ast, importlib, sys
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, ModuleType

FOREIGN = ("torch", "transformers", "deepspeed", "accelerate")
ROOT, PLANTED = Path(sys.argv[1]), sys.argv[2:]


def load(module, names=()):
    with suppress(ImportError):
        loaded = importlib.import_module(module)
        for name in names:
            if not hasattr(loaded, name):
                importlib.import_module(f"{module}.{name}")


def contents(value):
    '''The parts of a class or a registry, by name: each part is kept, so that its id stays its.'''
    if isinstance(value, (type, MappingProxyType)):
        return dict(vars(value)) if isinstance(value, type) else dict(value)
    if type(value) is dict:
        return {repr(key): part for key, part in value.items()}
    if type(value) in (list, set, frozenset):
        return {repr(part): part for part in value}
    return {}


def snapshot(modules):
    found = {}
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ != name:
                continue
            for inner, part in contents(value).items():
                found[f"{name}.{key}.{inner}"] = part
                if isinstance(value, type):
                    for last, leaf in contents(part).items():
                        found[f"{name}.{key}.{inner}.{last}"] = leaf
    return found


paths = [path for path in sorted((ROOT / "trainer").rglob("*.py")) if path.stem != "__main__"]
for path in paths:  # what the libraries do to each other is not ours
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(FOREIGN):
            load(node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] not in ("trainer", "launch"):
                    load(alias.name)
modules = {
    name: module
    for name, module in sys.modules.items()
    if name.split(".")[0] in FOREIGN and type(module).__name__ != "_LazyModule" and module
}
before = snapshot(modules)
names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
for name in (*names, *PLANTED):
    importlib.import_module(name.removesuffix(".__init__"))
after, none = snapshot(modules), object()
print("modules", len(modules))
for place in {**before, **after}:
    was, now = before.get(place, none), after.get(place, none)
    same = was is now or (type(was) in (dict, list, set, str, int, float, tuple) and was == now)
    if not same and not (was is none and isinstance(now, ModuleType)):
        print("changed", place)
"""

PLANTED = """
import accelerate, deepspeed, torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ALL_ATTENTION_FUNCTIONS.register("sdpa", print)
torch.nn.Linear.forward = print
torch.nn.init.trunc_normal_ = print
accelerate.Accelerator.ours = "a new attribute"
deepspeed.initialize = print
"""
FOUND = (
    "transformers.modeling_utils.AttentionInterface._global_mapping.'sdpa'",
    "torch.nn.modules.linear.Linear.forward",
    "torch.nn.init.trunc_normal_",
    "accelerate.accelerator.Accelerator.ours",
    "deepspeed.initialize",
)


@pytest.mark.parametrize("planted", [False, True])
def test_importing_every_module_changes_no_library(planted: bool, tmp_path: Path) -> None:
    """In a fresh process; what a planted module changes is found."""
    (tmp_path / "planted.py").write_text(PLANTED if planted else "")
    command = [sys.executable, "-c", PROGRAM, str(ROOT), "planted"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    changed = {words[1] for words in lines if words[:1] == ["changed"]}
    assert [int(words[1]) > 1000 for words in lines if words[:1] == ["modules"]] == [True]
    assert changed >= set(FOUND) if planted else not changed, changed
