"""`meshloom COMMAND`, which is also `python -m trainer.command COMMAND`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import NoReturn

from trainer.command import run_command

EPILOG = """
  meshloom plan          what a run will take: memory, traffic, time; without a GPU
  meshloom train         train from a DeepSpeed JSON config
  meshloom verify        prove that a config trains as one process does
  meshloom status        what a run does, from outside
  meshloom report        a run as one HTML page, with pictures
  meshloom checkpoint    list, verify, look into and import checkpoints
  meshloom import        write a config from Axolotl's, LLaMA-Factory's or the Trainer's

Each of them has its own --help.
"""


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="meshloom",
        description="Trains transformers from a DeepSpeed JSON config.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        choices=("plan", "train", "verify", "status", "report", "checkpoint", "import"),
        help="what to do",
    )
    command = parser.parse_args(sys.argv[1:2]).command  # the rest is parsed by the command
    module = {"import": "import_config"}.get(
        command, command
    )  # `import` is a keyword, so no module has that name
    run_command(
        import_module(f"trainer.command.{module}").main, sys.argv[2:], f"meshloom {command}"
    )


if __name__ == "__main__":
    main()
