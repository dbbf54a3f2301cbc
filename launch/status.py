#!/usr/bin/env python3
"""Show what a run does: `meshloom status`, as a script. See --help."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.command.processes import run_command
from trainer.command.status import main

if __name__ == "__main__":
    run_command(main, sys.argv[1:], "launch/status.py")
