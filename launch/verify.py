#!/usr/bin/env python3
"""Prove that a config trains as one process does: `meshloom verify`, as a script. See --help."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.command import run_command
from trainer.command.verify import main

if __name__ == "__main__":
    run_command(main, sys.argv[1:], "launch/verify.py")
