"""The gallery of families: its page is that of its rows, and its rows are those of the planner."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from tests.support.commands import ROOT

BILLIONS = {
    "llama3-8b": 8.03, "qwen3-8b": 8.19, "gpt-oss-20b": 20.91, "mistral-7b": 7.25,
    "olmo3-7b": 7.3, "smollm3-3b": 3.08, "mixtral-8x7b": 46.7, "deepseek-v3": 671.0,
}  # fmt: skip
"""The parameters that the models' authors name, of those that are whole in the gallery."""


def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "benchmarks" / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_rows() -> None:
    module = gallery()
    assert module.page(module.rows()) == module.PAGE.read_text()
    full = (ROOT / "examples" / "gallery" / "full.json").read_text().rstrip()
    assert f"```json\n{full}\n```" in module.PAGE.read_text()


def test_the_configs_differ_in_the_adapter_alone() -> None:
    folder = ROOT / "examples" / "gallery"
    full, lora = (json.loads((folder / f"{kind}.json").read_text()) for kind in ("full", "lora"))
    assert lora["trainer"].pop("adapter") == {"type": "lora", "r": 16, "alpha": 32}
    full["optimizer"]["params"].pop("lr")
    lora["optimizer"]["params"].pop("lr")
    assert full == lora


def test_the_shapes_have_the_sizes_of_the_models() -> None:
    for row in gallery().rows():
        if row.kind == "full" and row.family in BILLIONS:
            assert row.billions == pytest.approx(BILLIONS[row.family], rel=0.005), row.family


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "kind", "devices"),
    [("smollm3-3b", "full", 8), ("llama3-8b", "lora", 1), ("mixtral-8x7b", "full", 64)],
)
def test_a_row_is_planned_again(family: str, kind: str, devices: int) -> None:
    module = gallery()
    written = [row for row in module.rows() if row[:3] == (family, kind, devices)]
    now = module.row(family, kind, devices, search=False)
    assert [now] == [row._replace(longest=0) for row in written]
