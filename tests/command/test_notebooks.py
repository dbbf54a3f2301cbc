"""The notebooks run from top to bottom on a CPU, and keep what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.notebooks import FOLDER, code_cells, run_notebook

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_three_and_each_keeps_its_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["certificate", "first_chat_model", "ladder"]
    for path in NOTEBOOKS:
        cells = code_cells(json.loads(path.read_text()))
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)], path
        assert cells[-1]["outputs"], path


@pytest.mark.more
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path) -> None:
    """Its cells assert what they show."""
    before = path.read_text()
    printed = run_notebook(path)
    assert printed[-1].strip()
    assert path.read_text() == before
