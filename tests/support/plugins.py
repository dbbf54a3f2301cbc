"""A command of Meshloom with the tests' plug-ins on Python's path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT

PACKAGE = ROOT / "tests" / "support" / "plugin"


def command(
    folder: Path, config: dict[str, Any], *words: str, beside: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder on a config, `job.json`. `beside`: another folder of packages."""
    (folder / "job.json").write_text(json.dumps(config))
    places = [ROOT, PACKAGE, *([beside] if beside else [])]
    path = {"PYTHONPATH": ":".join(map(str, places)), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "trainer.command", *words, "--config", "job.json"]
    return subprocess.run(
        arguments, cwd=folder, env=os.environ | path, capture_output=True, text=True, timeout=400
    )
