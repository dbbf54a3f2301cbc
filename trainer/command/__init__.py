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
from typing import NoReturn, TextIO, cast

from trainer.errors import DiskError, MeshloomError
from trainer.storage import Unfailing

Main = Callable[[Sequence[str], str], int]
"""Runs a command with its arguments, under a name; returns its exit code."""


def parser_of(
    name: str, description: str, epilog: str = "", usage: str | None = None
) -> argparse.ArgumentParser:
    """Make the parser of the command `name`; the texts of its help keep their lines."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(name, usage, description.strip(), epilog, formatter_class=raw)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments --config and key.path=value."""
    text = "a DeepSpeed config, JSON or YAML, or the name of one that is shipped"
    parser.add_argument("--config", required=True, metavar="JSON", help=text)
    text = "overrides a key of the config"
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=text)


def reporting(main: Main) -> Main:
    """Print an error that the user can mend, instead of raising it, and return its exit code."""

    @wraps(main)
    def reported(arguments: Sequence[str], name: str) -> int:
        try:
            return main(arguments, name)
        except MeshloomError as error:
            print(error.render(), file=sys.stderr)
            return error.exit_code

    return reported


def run_command(main: Main, arguments: Sequence[str], name: str) -> NoReturn:
    """Run a command, and end this process at once with its exit code: a library's teardown may
    abort.

    Output that can't be written does not end a command, but its exit code is then 74 if nothing
    else failed, unless the reader of standard output has left.
    """
    for descriptor in range(3):  # the next opened file would get the number of a closed one
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    output, errors = Unfailing(sys.stdout or open(1, "w")), Unfailing(sys.stderr or open(2, "w"))
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, errors)
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
