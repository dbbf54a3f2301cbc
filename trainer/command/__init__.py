"""The commands; `launch/` has as scripts those that launchers start."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TextIO, cast

from trainer.errors import DiskError
from trainer.storage import Unfailing


def run_command(
    main: Callable[[Sequence[str], str], int], arguments: Sequence[str], name: str
) -> NoReturn:
    """Run a command, and end this process with its exit code: a library's teardown may abort after
    all was done.

    Output that can't be written does not end a command, but its exit code is then 74 if nothing
    else failed, unless the reader of standard output has left.
    """
    for descriptor in range(3):  # the next opened file would get the number of a closed one
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    output = Unfailing(sys.stdout or open(1, "w"))
    sys.stdout, sys.stderr = (
        cast(TextIO, output),
        cast(TextIO, Unfailing(sys.stderr or open(2, "w"))),
    )
    code = main(arguments, name)
    sys.stdout.flush()
    if output.lost is not None and output.lost.errno != errno.EPIPE and code == 0:
        print(
            f"disk error: standard output can't be written ({output.lost.strerror})",
            file=sys.stderr,
        )
        code = DiskError.exit_code
    sys.stderr.flush()
    os._exit(code)
