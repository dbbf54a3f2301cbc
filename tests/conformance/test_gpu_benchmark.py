"""The GPU benchmark runs where there is none, so that it does not rot until there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks/gpu.py"


@pytest.mark.parametrize(
    "arms",
    [
        ["mesh"],
        pytest.param(["accelerate", "deepspeed", "Trainer", "bare FSDP2"], marks=pytest.mark.whole),
    ],
    ids=["mesh", "all others"],
)
def test_it_makes_its_table_at_tiny_size(tmp_path, arms):
    command = [
        sys.executable,
        SCRIPT,
        "--device",
        "cpu",
        "--tiny",
        "--output",
        tmp_path / "gpu.md",
        "--arms",
        *arms,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    table = (tmp_path / "gpu.md").read_text()
    for arm in arms:
        [row] = [line for line in table.splitlines() if line.startswith(f"| tiny | {arm} |")]
        assert "failed" not in row and "left out" not in row, row
