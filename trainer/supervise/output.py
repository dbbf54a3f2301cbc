"""The terminal: the run's own lines and signs of life. What libraries print goes to the log."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainer.storage import Unfailing, disk_errors, opened_at_once
from trainer.supervise.stall import Phase

_MOMENT = 2.0
_BETWEEN = 600.0
"""Seconds after which a phase has a line without a terminal, and seconds until it has another."""
UNSEEN = Console(quiet=True)


class Signs:
    """A display of what the run is doing, with its seconds.

    On a terminal it is one live line below all other output; elsewhere a line for each phase that
    takes a while before the first step, and another every ten minutes. `hide` makes room for
    another live display (rich shows one at a time), until the next phase. On a quiet terminal,
    which is the default, nothing is shown.
    """

    def __init__(self, terminal: Console = UNSEEN) -> None:
        self._terminal = terminal
        self._phase = ""
        self._begun = 0.0
        self._due = 0.0
        self._live: Live | None = None
        self._first = 0
        """The step at which the run begins."""
        self._applied: set[str] = set()
        self._closed = threading.Event()
        if not terminal.is_terminal and not terminal.quiet:
            threading.Thread(target=self._tell, name="signs", daemon=True).start()

    def at(self, phase: str, stays: bool = False) -> None:
        """Begin a phase, unless closed; one that `stays` gets a line at once, which is kept."""
        if self._closed.is_set() or self._terminal.quiet:
            return
        self._begun = time.monotonic()
        self._phase = f"start   {phase}"
        self._due = self._begun + (_BETWEEN if stays else _MOMENT)
        if stays:
            self._terminal.print(Text(self._phase), soft_wrap=True)
        self._show()

    def at_step(self, step: int, steps: int, phase: Phase) -> None:
        """Begin a phase of the loop; without a terminal, the display ends with the first step."""
        if self._closed.is_set() or self._terminal.quiet:
            return
        if self._terminal.is_terminal:
            self._phase = f"step {step}/{steps}, {phase}"
            self._begun = time.monotonic()
            self._show()
        elif step != (self._first or step) or phase not in (Phase.WAITING, Phase.TRAINING):
            self._phase = ""
        self._first = self._first or step

    def _show(self) -> None:
        if self._terminal.is_terminal and self._live is None:
            self._live = Live(
                get_renderable=self._line,
                console=self._terminal,
                transient=True,
                redirect_stdout=False,  # what libraries print goes to the log
                redirect_stderr=False,
            )
            self._live.start()

    def note(self, text: str) -> None:
        """Print a line for the user, whatever the phase."""
        self._terminal.print(Text(f"note: {text}"), soft_wrap=True)

    def applied(self, text: str) -> None:
        """Print once what is applied to the model while it is wrapped: "FSDP over shard=8"."""
        if text not in self._applied:
            self._applied.add(text)
            self._terminal.print(Text(f"applied {text}"), soft_wrap=True)

    def hide(self) -> None:
        if self._live is not None:
            live = self._live
            self._live = None
            live.stop()
        self._phase = ""

    def close(self) -> None:
        self._closed.set()
        self.hide()

    def _line(self) -> Text:
        seconds = time.monotonic() - self._begun
        return Text(f"{self._phase} ({seconds:.0f} s)", no_wrap=True, overflow="ellipsis")

    def _tell(self) -> None:
        while not self._closed.wait(_MOMENT / 8):
            now = time.monotonic()
            if self._phase and now >= self._due:
                self._due = now + _BETWEEN
                self._terminal.print(self._line(), soft_wrap=True)


class Output:
    """Takes over standard output and error; `terminal` still writes to the user.

    A temporary file keeps the output until the log's place is known. Works on file descriptors, so
    that it also catches compilers, C++ warnings and the stack of a crash in native code.
    """

    def __init__(self, quiet: bool = False) -> None:
        """Take over the output; if `quiet`, only this process's errors are shown."""
        reached = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        self.terminal = cast(TextIO, Unfailing(reached, self._tell_lost))
        self._errors = os.dup(2)
        self.console = Console(file=self.terminal, highlight=False, quiet=quiet)
        self.signs = Signs(self.console)
        self._log = tempfile.TemporaryFile("w+b")
        self._redirect(self._log.fileno())
        sys.stdout = cast(TextIO, Unfailing(sys.stdout))
        sys.stderr = cast(TextIO, Unfailing(sys.stderr))
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
        line = f"note: the output can't be written ({error.strerror}): the run continues without"
        with suppress(OSError):
            os.write(self._errors, f"{line}\n".encode())
        print(line, file=sys.stderr, flush=True)

    def _redirect(self, descriptor: int) -> None:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
