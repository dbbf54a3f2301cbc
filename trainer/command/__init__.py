"""The commands, and what they share: parser, errors, exit codes; `launch/` has two as scripts."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn, TextIO, cast

from trainer.errors import DiskError, MeshloomError, printable, suggestion
from trainer.storage import Unfailing

SPINS = 5000
"""How often a waiting thread of PyTorch looks before it sleeps. By default it is 300,000 times: on
cores that others use, too, the threads then wait for each other in every operator."""
Main = Callable[[Sequence[str], str], int]
"""Runs a command with its arguments, under a name; returns its exit code."""


def parser_of(
    name: str, description: str, epilog: str = "", usage: str | None = None
) -> argparse.ArgumentParser:
    """Make the parser of the command `name`; the texts of its help keep their lines."""
    raw = argparse.RawDescriptionHelpFormatter
    return _Parser(name, usage, description.strip(), epilog, formatter_class=raw)


class _Parser(argparse.ArgumentParser):
    """Reports a misspelt option first: the one that is meant would be reported as missing."""

    given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: object = None) -> Any:
        self.given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: object = None) -> Any:
        self.given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        options = [name for action in self._actions for name in action.option_strings]
        names = [word.partition("=")[0] for word in self.given if word.startswith("-")]
        known = lambda name: any(option.startswith(name) for option in options)  # noqa: E731
        strange = [name for name in names if not known(name) and not _is_number(name)]
        if strange:
            message = f"there is no {strange[0]}. {suggestion(strange[0], options)}".rstrip()
        elif "invalid choice: " in message:
            word = message.partition("invalid choice: '")[2].partition("'")[0]
            choices = [str(one) for action in self._actions for one in action.choices or ()]
            message = f"{message}. {suggestion(word, choices)}".rstrip(". ")
        elif "required: --config" in message:
            configs = [word for word in self.given if word.endswith((".json", ".yaml", ".yml"))]
            message += f". Did you mean --config {configs[0]}?" if configs else ""
        super().error(printable(message))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments --config and key.path=value."""
    text = "a DeepSpeed config, JSON or YAML, or the name of one that is shipped"
    parser.add_argument("--config", required=True, metavar="JSON", help=text)
    text = "overrides a key of the config"
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=text)


def reporting(main: Main) -> Main:
    """Print an error that the user can act on, instead of raising it, and return its exit code."""

    @wraps(main)
    def reported(arguments: Sequence[str], name: str) -> int:
        try:
            return main(arguments, name)
        except MeshloomError as error:
            print(error.render(), file=sys.stderr)
            return error.exit_code

    return reported


def run_command(main: Main, arguments: Sequence[str], name: str) -> NoReturn:
    """Run a command and end this process with its exit code, without a library's teardown.

    A teardown may abort. Output that can't be written does not end a command, but its exit code is
    then 74 if nothing else failed, unless the reader of standard output has closed it.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)  # before PyTorch is loaded
    for descriptor in range(3):  # the next opened file would get the number of a closed one
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    output = Unfailing(sys.stdout or open(1, "w"))
    errors = Unfailing(sys.stderr or open(2, "w"))
    sys.stdout = cast(TextIO, output)
    sys.stderr = cast(TextIO, errors)
    sys.stdin = open(0, errors="replace", closefd=False)  # it may have been closed
    try:
        code = main(arguments, name)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    if output.lost is not None and output.lost.errno != errno.EPIPE and code == 0:
        line = f"disk error: standard output can't be written ({output.lost.strerror})"
        print(line, file=sys.stderr)
        code = DiskError.exit_code
    sys.stderr.flush()
    os._exit(code)
