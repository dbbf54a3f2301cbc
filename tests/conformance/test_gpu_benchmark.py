"""The GPU benchmark runs where there is none, so that it does not rot until there is one."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.messages import shows

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks/gpu.py"


OTHERS = ["mesh, compiled", "mesh, compiled, float8", "mesh, saving", "bare FSDP2"]
OTHERS += ["bare FSDP2, compiled", "accelerate", "deepspeed", "Trainer"]
OTHERS += ["mesh, LoRA", "mesh, QLoRA"]


@pytest.mark.more
@pytest.mark.parametrize(
    "arms",
    [["mesh"], *(pytest.param([arm], marks=pytest.mark.more) for arm in OTHERS)],
    ids=["mesh", *OTHERS],
)
def test_it_makes_its_table_at_tiny_size(tmp_path, arms):
    command = [sys.executable, SCRIPT, "--smoke", "--output", tmp_path / "gpu.md", "--arms", *arms]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    table = (tmp_path / "gpu.md").read_text()
    for arm in arms:
        [row] = [line for line in table.splitlines() if line.startswith(f"| tiny | {arm} |")]
        _, _, _, step, _, _, planned, _, besides, _ = [cell.strip() for cell in row.split("|")]
        if "float8" in arm and find_spec("torchao") is None:
            shows(besides, "left out", "torchao")
            continue
        measures = ("save ", "load ", "first stall ", "; stall ", "beside it")
        assert all(word in besides for word in measures) if arm == "mesh, saving" else step, row
        assert not any(word in besides for word in ("failed", "stopped", "left out")), row
        assert float(planned) > 0 if arm[0] in "mad" else planned == "-", row
