"""The output on the terminal, which has the run's own lines; the output of libraries goes to the rank's log."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from trainer.storage import Unfailing, disk_errors, opened_at_once
from trainer.supervise.signs import Signs


class Output:
    """Takes over standard output and error; `terminal` still writes to the user.

    A temporary file keeps the output until the log's place is known. Works on file descriptors, so
    that it also catches compilers, C++ warnings and the stack of a crash in native code.
    """

    def __init__(self, quiet: bool = False) -> None:
        """Take over the output; if `quiet`, another process reports for this one, of which only errors are shown."""
        reached = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        self.terminal = cast(TextIO, Unfailing(reached, self._tell_lost))
        self._errors = os.dup(2)
        self.console = Console(file=self.terminal, highlight=False, quiet=quiet)
        self.signs = Signs(self.console)
        self._log = tempfile.TemporaryFile("w+b")
        self._redirect(self._log.fileno())
        sys.stdout, sys.stderr = cast(TextIO, Unfailing(sys.stdout)), cast(TextIO, Unfailing(sys.stderr))
        faulthandler.enable(2)

    def say(self, line: str) -> None:
        """Print a line on any rank, above a live line if there is one."""
        if self.console.quiet:
            print(line, file=self.terminal, flush=True)
        else:
            self.console.print(line, markup=False, soft_wrap=True)

    def log_to(self, path: Path) -> None:
        """Write the log, with everything so far, to `path` from now on."""
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", buffering=0, opener=opened_at_once) as file:
                self._log.seek(0)
                file.write(self._log.read())
                self._redirect(file.fileno())
        self._log.close()

    def _tell_lost(self, error: OSError) -> None:
        """Report lost output where errors go, if that can be written, and in the log."""
        line = f"note: the output can't be written ({error.strerror}): the run goes on without"
        with suppress(OSError):
            os.write(self._errors, f"{line}\n".encode())
        print(line, file=sys.stderr, flush=True)

    def _redirect(self, descriptor: int) -> None:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
