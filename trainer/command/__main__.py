"""`meshloom COMMAND`, which is also `python -m meshloom COMMAND`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from trainer.command import parser_of, run_command

COMMANDS = {
    "plan": "predict a run's memory, traffic and time, without a GPU",
    "train": "train from a DeepSpeed JSON config",
    "verify": "check that a config trains as one process does",
    "status": "show what a run is doing, or how it ended",
    "report": "write a run as one HTML page, with pictures",
    "generate": "continue a text with a trained model",
    "chat": "chat with a trained model",
    "evaluate": "evaluate a trained model on tasks of lm-eval",
    "checkpoint": "list, verify, show and import checkpoints",
    "merge": "merge a LoRA adapter into its base",
    "push": "push a run to the Hugging Face Hub, or write it to a folder",
    "import": "write a config from Axolotl's, LLaMA-Factory's or the Trainer's",
    "schema": "print the JSON Schema of a config, for editors",
}
MODULES = {"import": "import_config"} | dict.fromkeys(("generate", "chat", "evaluate"), "use")
"""Commands -> their file, where it has another name."""
COMPLETION = Path(__file__).with_name("completion.bash")
EPILOG = "".join(f"\n  meshloom {name:<13} {text}" for name, text in COMMANDS.items())


def main() -> NoReturn:
    epilog = f"{EPILOG}\n\nEach of them has its own --help.\n"
    parser = parser_of("meshloom", "Trains transformers from a DeepSpeed JSON config.", epilog)
    text = "one of those below"
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=text)
    text = "print the completion script for bash"
    script = COMPLETION.read_text()
    parser.add_argument("--print-completion", action="version", version=script, help=text)
    command = parser.parse_args(sys.argv[1:2]).command  # the rest is parsed by the command
    main = import_module(f"trainer.command.{MODULES.get(command, command)}").main
    run_command(main, sys.argv[2:], f"meshloom {command}")


if __name__ == "__main__":
    main()
