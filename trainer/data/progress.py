"""How far the preparing of data is, for a person who waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from trainer.errors import printable
from trainer.trackers import Signs

_MOMENT, _BETWEEN = 2.0, 30.0
"""Seconds before anything is shown, and between lines where there is no terminal."""
_OF_OTHERS = 7 * 86_400.0
"""Seconds that another process may take for what this one waits for."""


class Progress:
    """One line that changes on a terminal, elsewhere a line now and then; none for what takes a moment."""

    def __init__(
        self,
        console: Console | None = None,
        moves: Callable[[float], None] = lambda seconds: None,
        signs: Signs | None = None,
    ) -> None:
        """`moves` is told that it goes on, and for how many seconds it may rightly show nothing."""
        self._console, self._moves, self._signs = console, moves, signs or Signs()
        self._bar: Bar | None = None
        self._name, self._begun, self._shown = "", math.inf, 0.0
        self._from: tuple[int, float] | None = None
        self._noted: set[str] = set()

    def begin(self, name: str) -> None:
        self._name, self._begun, self._from = name, time.monotonic(), None
        self._shown = self._begun - _BETWEEN + _MOMENT
        self._signs.at(f"prepare {name}")

    def at(self, share: float | None, documents: int, tokens: int) -> None:
        """`share` of the input has been read, if one can tell."""
        now = time.monotonic()
        first, since = self._from = self._from or (tokens, now)
        rate = f", {(tokens - first) / (now - since):,.0f} a second" if now > since else ""
        self._show(f"{documents:,} documents, {tokens:,} tokens{rate}", share)

    def say(self, text: str) -> None:
        self._show(text, None)

    def checks(self, done: int, all: int) -> None:
        """Bytes whose hashes are compared, or written."""
        self._show(f"checking what is prepared, {done / 1e9:.1f} of {all / 1e9:.1f} GB", done / max(all, 1))

    def note(self, line: str) -> None:
        """Of what is not as one would think; at once, and once."""
        self._moves(0.0)
        if self._console is not None and line not in self._noted:
            self._noted.add(line)
            self._console.print(printable(line), soft_wrap=True, markup=False)

    def waits(self) -> None:
        """For another process that prepares the same; said at once, nothing follows for long."""
        self._shown = self._begun = time.monotonic() - _BETWEEN
        self.say("another process does it: waiting")
        self._moves(_OF_OTHERS)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, text: str, share: float | None) -> None:
        now = time.monotonic()
        self._moves(0.0)
        if self._console is None or now - self._begun < _MOMENT:
            return
        self._signs.hide()
        if self._console.is_terminal:
            if self._bar is None:
                columns = TextColumn("prepare {task.description}"), BarColumn(), TextColumn("{task.fields[text]}")
                self._bar = Bar(*columns, console=self._console, transient=True, refresh_per_second=4)
                self._bar.add_task(self._name, total=None, text="")
                self._bar.start()
            self._bar.update(
                self._bar.task_ids[0], total=None if share is None else 1.0, completed=share or 0.0, text=text
            )
        elif now - self._shown >= _BETWEEN:
            self._shown = now
            done = "" if share is None else f"{share:.0%}, "
            self._console.print(f"prepare {self._name}: {done}{text}", soft_wrap=True, markup=False)


QUIET = Progress()
