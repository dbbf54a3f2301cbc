"""The code of docs/hooks.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT

SCRIPT, PLUGIN, CONFIG = re.findall(
    r"^```(?:python|json)\n(.*?)^```",
    (ROOT / "docs/hooks.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def run(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.more
def test_the_plugin_trains(tmp_path: Path) -> None:
    (tmp_path / "parity.py").write_text(PLUGIN)
    (tmp_path / "parity.json").write_text(CONFIG)
    run(tmp_path, "-m", "meshloom", "train", "--config", "parity.json", "trainer.device=cpu")
    lines = (tmp_path / "runs" / "parity" / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["10", "20", "20"]


@pytest.mark.more
def test_the_script_trains(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("trainer.steps=60", 'trainer.device=cpu", "trainer.steps=60')
    )
    shown = run(tmp_path, "script.py")
    assert re.search(r"^\{'precision': [01]\.\d+\}$", shown, re.MULTILINE), shown
