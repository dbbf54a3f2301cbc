"""The notebooks of examples/notebooks, run from top to bottom without Jupyter.

    python -m tests.support.notebooks        # runs them, and writes what each cell printed

A cell's code is plain Python: what it prints is its output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT

FOLDER = ROOT / "examples" / "notebooks"
LONGEST = 1200
"""Seconds that a notebook may take on a busy machine."""


def run_cells(path: Path) -> list[str]:
    """Run a notebook's code in this process, in its folder; return what each code cell printed."""
    os.chdir(path.parent)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells(json.loads(path.read_text()))):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
        printed.append(stream.getvalue())
    return printed


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_notebook(path: Path) -> list[str]:
    """Run a notebook in a fresh process; return what each code cell printed.

    Raises CalledProcessError if a cell raises anything.
    """
    code = (
        "import json, pathlib, sys\n"
        "from tests.support.notebooks import run_cells\n"
        "print('\\0' + json.dumps(run_cells(pathlib.Path(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(path)]
    with tempfile.TemporaryDirectory() as scratch:  # where a notebook's own folder is made
        result = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LONGEST,
            check=True,
            env={**os.environ, "TMPDIR": scratch},
        )
    printed: list[str] = json.loads(result.stdout.rpartition("\0")[2])
    return printed


def main() -> None:
    for path in sorted(FOLDER.glob(sys.argv[1] if len(sys.argv) > 1 else "*.ipynb")):
        notebook = json.loads(path.read_text())
        for number, (cell, text) in enumerate(
            zip(code_cells(notebook), run_notebook(path), strict=True), 1
        ):
            stream = {"name": "stdout", "output_type": "stream"}
            cell["outputs"] = [stream | {"text": text.splitlines(keepends=True)}] if text else []
            cell["execution_count"] = number
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
