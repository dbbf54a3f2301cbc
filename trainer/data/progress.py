"""The progress of preparing data, shown to a waiting user."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from trainer.errors import printable
from trainer.supervise.output import Signs

_MOMENT = 2.0
_BETWEEN = 30.0
"""Seconds before anything is shown, and between lines without a terminal."""
_MARKED = 1.0
"""The least seconds between two touches of the file that shows progress to other processes."""


class Progress:
    """A display of progress, after a moment: a changing line on a terminal, else several lines."""

    def __init__(
        self,
        console: Console | None = None,
        moves: Callable[[float], None] = lambda seconds: None,
        signs: Signs | None = None,
    ) -> None:
        """Call `moves(seconds)` on progress, with the seconds for which none may follow."""
        self._console = console
        self._moves = moves
        self._signs = signs or Signs()
        self._bar: Bar | None = None
        self._name = ""
        self._begun = math.inf
        self._shown = 0.0
        self._from: tuple[int, float] | None = None
        self._noted: set[str] = set()
        self._mark: Path | None = None
        self._marked = 0.0

    def begin(self, name: str) -> None:
        self._name = name
        self._begun = time.monotonic()
        self._from = None
        self._shown = self._begun - _BETWEEN + _MOMENT
        self._signs.at(f"prepare {name}")

    def at(self, share: float | None, documents: int, tokens: int) -> None:
        """Show documents and tokens so far; `share` of the input has been read, if known."""
        now = time.monotonic()
        first, since = self._from = self._from or (tokens, now)
        rate = f", {(tokens - first) / (now - since):,.0f} a second" if now > since else ""
        self._show(f"{documents:,} documents, {tokens:,} tokens{rate}", share)

    def say(self, text: str) -> None:
        self._show(text, None)

    def checks(self, done: int, all: int) -> None:
        """Show the bytes whose hashes have been compared or written."""
        size = f"{done / 1e9:.1f} of {all / 1e9:.1f} GB"
        self._show(f"checking what is prepared, {size}", done / max(all, 1))

    def moves(self, seconds: float = 0.0) -> None:
        """Note progress; none may follow for so many seconds."""
        self._moves(seconds)
        mark = self._mark
        now = time.monotonic()
        if mark is not None and now - self._marked > _MARKED:
            self._marked = now
            with suppress(OSError):  # a full disk is told by who writes data
                mark.touch()

    @contextmanager
    def marking(self, mark: Path) -> Iterator[None]:
        """Touch a file on progress in the context, for other processes that wait for this one."""
        self._mark = mark
        try:
            yield
        finally:
            self._mark = None

    def note(self, line: str) -> None:
        """Print a line about something unexpected, at once, and only once."""
        if line in self._noted:
            return
        self._noted.add(line)
        self.moves()
        if self._console is not None:
            self._console.print(printable(line), soft_wrap=True, markup=False)

    def waits(self) -> None:
        """Say that another process prepares the same data."""
        self._shown = self._begun = time.monotonic() - _BETWEEN
        self.say("another process does it: waiting")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, text: str, share: float | None) -> None:
        now = time.monotonic()
        self.moves()
        if self._console is None or now - self._begun < _MOMENT:
            return
        self._signs.hide()
        if self._console.is_terminal:
            if self._bar is None:
                self._bar = _bar(self._console, self._name)
            total = None if share is None else 1.0
            self._bar.update(self._bar.task_ids[0], total=total, completed=share or 0.0, text=text)
        elif now - self._shown >= _BETWEEN:
            self._shown = now
            done = "" if share is None else f"{share:.0%}, "
            self._console.print(f"prepare {self._name}: {done}{text}", soft_wrap=True, markup=False)


def _bar(console: Console, name: str) -> Bar:
    before = TextColumn("prepare {task.description}")
    after = TextColumn("{task.fields[text]}")
    shown = Bar(before, BarColumn(), after, console=console, transient=True, refresh_per_second=4)
    shown.add_task(name, total=None, text="")
    shown.start()
    return shown


QUIET = Progress()
