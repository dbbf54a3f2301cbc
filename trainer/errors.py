"""Errors that the user can act on, and the exit code of each kind."""

from __future__ import annotations

import json
import os
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Self, TypeVar

T = TypeVar("T")

MOST_SHOWN = 20
"""The most problems that an error spells out; it counts the others."""

FLAGS = {
    "--resume-weights-only": "resume_weights_only=True",
    "--resume-anyway": "resume_anyway=True",
    "--resume auto": 'resume="auto"',
    "--resume": "resume",
    "--fresh": "fresh=True",
    "--world-size": "processes",
    "Run the same command": "Make the same call",
}
"""Command line flags and their Python equivalents, longer ones before those they begin with."""


def printable(text: str) -> str:
    """Return `text` with escapes such as `\\x1b` for characters that steer a terminal.

    Line breaks and tabs stay; a lone surrogate, which no terminal takes, is an escape, too.
    """
    return "".join(c if c in "\n\t" or not _steers(c) else ascii(c)[1:-1] for c in text)


def _steers(character: str) -> bool:
    return (
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        or character in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: its place, the actual value or event, and what to do about it.

    A value has an expectation; an event, such as a lost connection, has none.
    """

    place: str
    actual: str
    expected: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        place = self.place if len(self.place) <= 500 else f"{self.place[:500]}..."
        line = f"{place}: {self.actual}"
        if self.expected is not None:
            line += f"; expected {self.expected}"
        if self.hint:
            line += f". {self.hint}"
        return printable(line).replace("\n", "\\n")


class MeshloomError(Exception):
    """The base of every error that the user can act on; it has one or more problems."""

    exit_code = 70
    kind = "internal error"
    shared = False
    """True once every rank has raised it, so that one of them can report it for all."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    def share(self) -> Self:
        """Mark this error as one that every rank raises; return it."""
        self.shared = True
        return self

    def reword_for_python(self) -> None:
        """Reword the problems, in place, for the Python API."""
        self.problems = tuple(
            Problem(*(text and in_python(text) for text in vars(problem).values()))
            for problem in self.problems
        )
        self.args = ("\n".join(map(str, self.problems)),)

    def render(self) -> str:
        """Return the text for a terminal: one line per problem, up to MOST_SHOWN."""
        count = len(self.problems)
        head = self.kind + (f" ({count} problems)" if count > 1 else "")
        lines = [f"  {problem}" for problem in self.problems[:MOST_SHOWN]]
        rest = [f"  and {count - MOST_SHOWN:,} more"] if count > MOST_SHOWN else []
        return "\n".join([f"{head}:", *lines, *rest])


class ConfigError(MeshloomError):
    """The config, the command line, the layout or the model does not fit."""

    exit_code = 64
    kind = "config error"


class DataError(MeshloomError):
    """The training data can't be read or does not fit."""

    exit_code = 65
    kind = "data error"


class NoSamples(DataError):
    """A source has no sample."""


class DiskError(MeshloomError):
    """The run folder can't be written, or is full."""

    exit_code = 74
    kind = "disk error"


class Stopped(MeshloomError):
    """A signal ended the run; what it had to save is saved, and the same command resumes it."""

    exit_code = 75
    kind = "stopped"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__()
        self.message = message
        self.hint = hint
        self._set_text()

    def reword_for_python(self) -> None:
        self.message = in_python(self.message)
        self.hint = in_python(self.hint)
        self._set_text()

    def render(self) -> str:
        """Return the text for a terminal, a line."""
        return str(self)

    def _set_text(self) -> None:
        self.args = (f"{self.message}. {self.hint}." if self.hint else self.message,)


class HubError(MeshloomError):
    """The Hugging Face Hub can't be reached, or did not take what is on the disk."""

    exit_code = 69
    kind = "hub error"


class NumericsError(MeshloomError):
    """The numbers went wrong: a non-finite loss or gradient, or a failed comparison."""

    exit_code = 76
    kind = "numerics error"


class Stalled(MeshloomError):
    """The run hung: no rank made progress within the time allowed."""

    exit_code = 77
    kind = "stalled"


def in_python(text: str) -> str:
    """Replace command line flags in a text by arguments of `trainer.train` and `trainer.verify`."""
    for flag, argument in FLAGS.items():
        text = text.replace(flag, argument)
    return text


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, shortened."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def named_line(error: BaseException, most: int = 300) -> str:
    """Return the first line of a library's error, after its class, shortened."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:most]


def raised_at(error: BaseException) -> str:
    """Return the last line outside PyTorch at which an error was raised: "model.py, line 12"."""
    inside = os.sep + "torch" + os.sep
    frames = [f for f in traceback.extract_tb(error.__traceback__) if inside not in f.filename]
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""


@dataclass(frozen=True)
class Raised:
    """An error that the code of a model raised."""

    error: Exception

    @property
    def reason(self) -> str:
        """The first line of the error, after its class."""
        return named_line(self.error)


def attempt(run: Callable[[], T]) -> T | Raised:
    """Run code that may raise anything, such as a model's own; return its result, or the error."""
    try:
        return run()
    except Exception as error:  # whatever a model's own code raises
        return Raised(error)


@contextmanager
def refused(
    place: str,
    expected: str,
    *kinds: type[Exception],
    named: bool = False,
    start: str = "",
    hint: str = "",
    raises: type[MeshloomError] = ConfigError,
) -> Iterator[None]:
    """Turn the errors inside, of these `kinds` or any but this project's own, into one it `raises`.

    The actual value is `start` and the error's first line; `named`: after its class. A panic of a
    library in Rust, which is no Exception, counts as any error does.
    """
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        known = isinstance(error, kinds or Exception) or (panic and not kinds)
        if isinstance(error, MeshloomError) or not known:
            raise
        actual = start + (named_line(error) if named else first_line(error))
        raise raises(Problem(place, actual, expected, hint)) from error


def suggestion(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return a question with the one or two known names that a wrong one is close to, if any is."""
    near = get_close_matches(word[:200], known, n=2, cutoff=cutoff)
    return "Did you mean " + " or ".join(f'"{name}"' for name in near) + "?" if near else ""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Join the first of some names or lines, and say how many more there are."""
    more = f"; and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def divided(number: int, parts: int) -> str:
    """Write a number as whole parts and a rest: "2 x 3 + 1" is 7 in 3 parts."""
    return f"{number // parts} x {parts} + {number % parts}"


def show(value: object, most: int = 60) -> str:
    """Show a value as JSON, cut to `most` characters; as cheap for one of 100 MB."""
    if isinstance(value, str):
        value = value[: most + 1]
    text = ""
    for part in json.JSONEncoder(default=str).iterencode(value):
        text += part[: most + 1]
        if len(text) > most:
            return text[: most - 3] + "..."
    return text
