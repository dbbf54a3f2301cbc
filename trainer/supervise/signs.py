"""Signs of life on the console: what the run is doing now."""

from __future__ import annotations

import threading
import time

from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from trainer.supervise.phase import Phase

_MOMENT, _BETWEEN = 2.0, 10.0
"""Seconds after which a phase has a line without a terminal, and seconds between such lines."""
UNSEEN = Terminal(quiet=True)


class Signs:
    """A display of what the run is doing: on a terminal one live line with its seconds, below all other
    output; elsewhere a line for phases that take a while before the first step, and then only what is logged.

    `hide` makes room for another live display (rich shows one at a time), until the next phase. On
    a quiet terminal, which is the default, nothing is shown.
    """

    def __init__(self, terminal: Terminal = UNSEEN) -> None:
        self._terminal = terminal
        self._phase, self._begun, self._due = "", 0.0, 0.0
        self._live: Live | None = None
        self._first = 0
        """The step at which the run begins."""
        self._closed = threading.Event()
        if not terminal.is_terminal and not terminal.quiet:
            threading.Thread(target=self._tell, name="signs", daemon=True).start()

    def at(self, phase: str, stays: bool = False) -> None:
        """Begin a phase; one that takes long gets a line at once, which `stays`. Does nothing after `close`."""
        if self._closed.is_set() or self._terminal.quiet:
            return
        self._begun = time.monotonic()
        self._phase, self._due = f"start   {phase}", self._begun + (_BETWEEN if stays else _MOMENT)
        if stays:
            self._terminal.print(Text(self._phase), soft_wrap=True)
        self._show()

    def at_step(self, step: int, steps: int, phase: Phase) -> None:
        """Begin a phase of the loop; without a terminal, the display ends with the first step."""
        if self._closed.is_set() or self._terminal.quiet:
            return
        if self._terminal.is_terminal:
            self._phase, self._begun = f"step {step}/{steps}, {phase}", time.monotonic()
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

    def hide(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
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
