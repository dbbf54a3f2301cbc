#!/usr/bin/env python3
"""Prove that a config trains as one process does. See --help."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.processes import start, world_of

DESCRIPTION = """
Runs a few steps of a small copy of the config's model under the config's own layout, on CPU processes, and as one
process of plain PyTorch; compares losses, every gradient, the clip norm, the weights after each step, and a resume.
Exit codes: 0 the same, 64 the config is wrong, 76 not the same.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--config", required=True, metavar="JSON", help="a DeepSpeed config")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="overrides a key of the config")
    parser.add_argument("--world-size", type=int, metavar="N", help="processes (default: the fewest, up to 8)")
    parser.add_argument("--output", type=Path, default=Path("certificate.json"), metavar="PATH")
    options = parser.parse_intermixed_args()
    from trainer.errors import MeshloomError
    from trainer.verify.shrink import shrink

    world = world_of(os.environ)
    try:
        small = shrink(options.config, options.overrides, world.world_size if world else options.world_size)
    except MeshloomError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if world is None:
        return start(small.layout.world_size, sys.argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from launch.output import Output

    output = Output()
    from trainer.verify.command import verify

    return verify(small, world.rank, world.world_size, options.output, output.terminal)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a library's teardown may abort after everything was done
