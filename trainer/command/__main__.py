"""`meshloom COMMAND`, which is also `python -m trainer.command COMMAND`."""

from __future__ import annotations

import argparse
import io
import re
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any, NoReturn

from trainer.command import PARSERS, Main, parser_of, run_command

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
    "push": "push a run to the Hugging Face Hub",
    "import": "write a config from Axolotl's, LLaMA-Factory's or the Trainer's",
    "schema": "print the JSON Schema of a config, for editors",
}
PLACES = {"import": "import_config:main"}
PLACES |= {name: f"use:{name}" for name in ("generate", "chat", "evaluate")}
"""Commands -> file and function, where it is not `main` of a file of that name."""
EPILOG = "".join(f"\n  meshloom {name:<13} {text}" for name, text in COMMANDS.items())
COMPLETION = "--print-completion"
AFTER_SPACE = """
_meshloom() { _shtab_meshloom "$@"; [[ ${COMPREPLY-} == *= ]] && compopt -o nospace; return 0; }
complete -o bashdefault -o default -F _meshloom meshloom
"""
"""Bash: no space after `key=`, and files where nothing else is known."""


def main() -> NoReturn:
    epilog = f"{EPILOG}\n\nEach of them has its own --help.\n"
    parser = parser_of("meshloom", "Trains transformers from a DeepSpeed JSON config.", epilog)
    parser.add_argument("command", choices=COMMANDS, help="one of those below")
    text = "print the script by which a shell completes all of this"
    parser.add_argument(COMPLETION, action=PrintCompletion, choices=("bash", "zsh"), help=text)
    first = sys.argv[1:3] if sys.argv[1:2] == [COMPLETION] else sys.argv[1:2]
    command = parser.parse_args(first).command  # the rest is parsed by the command
    run_command(function_of(command), sys.argv[2:], f"meshloom {command}")


def function_of(command: str) -> Main:
    file, _, function = PLACES.get(command, f"{command}:main").partition(":")
    return getattr(import_module(f"trainer.command.{file}"), function)  # type: ignore[no-any-return]


class PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(completion(given[1]))
        parser.exit()


def completion(shell: str) -> str:
    """Return the script by which a shell completes commands, options, files and a config's keys."""
    import shtab

    from trainer.config import TrainerSection, leaves
    from trainer.config.keys import KEYS
    from trainer.config.read import shipped_names

    whole = argparse.ArgumentParser("meshloom")
    made: Any = lambda prog, **_: PARSERS[prog]  # noqa: E731
    commands = whole.add_subparsers(parser_class=made)
    for name, text in COMMANDS.items():
        with redirect_stdout(io.StringIO()), suppress(SystemExit):
            function_of(name)(["--help"], f"meshloom {name}")
        commands.add_parser(name, help=text)
    script: str = shtab.complete(whole, shell)
    if shell == "zsh":
        return re.sub(r':"$', ':_files"', script, flags=re.MULTILINE)
    own = (f"trainer.{key}" for key, _ in leaves(TrainerSection().model_dump()))
    keys = " ".join(f"{key}=" for key in (*KEYS, *own))
    for name in ("train", "verify", "plan"):
        script += f"\n_shtab_meshloom_{name}_pos_0_choices=({keys})"
        script += f"\n_shtab_meshloom_{name}___config_choices=({' '.join(shipped_names())})"
    return script + AFTER_SPACE


if __name__ == "__main__":
    main()
