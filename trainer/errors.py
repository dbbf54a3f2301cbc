"""Errors a person can act on, and the exit code that each kind of them ends a run with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what was seen, what is expected there, and the mend."""

    place: str
    seen: str
    expected: str
    mend: str = ""

    def __str__(self) -> str:
        line = f"{self.place}: {self.seen}; expected {self.expected}"
        return f"{line}. {self.mend}" if self.mend else line


class MeshloomError(Exception):
    """Base of every error that is the user's to mend; carries one or more problems."""

    exit_code = 70
    kind = "internal error"
    shared = False
    """True once every rank has raised it, so that one of them can speak for all."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    def render(self) -> str:
        """The text for a terminal: one line per problem."""
        count = len(self.problems)
        head = self.kind + (f" ({count} problems)" if count > 1 else "")
        return "\n".join([f"{head}:", *(f"  {problem}" for problem in self.problems)])


def shared(error: MeshloomError) -> MeshloomError:
    """`error` as one that every rank raises."""
    error.shared = True
    return error


class ConfigError(MeshloomError):
    """The config, the command line, the layout or the model does not fit."""

    exit_code = 64
    kind = "config error"


class DataError(MeshloomError):
    """The training data can't be read or does not fit."""

    exit_code = 65
    kind = "data error"


class DiskError(MeshloomError):
    """The run folder can't be written, or is full."""

    exit_code = 74
    kind = "disk error"


class Preempted(MeshloomError):
    """The run was asked to stop and saved; the same command with --resume auto goes on."""

    exit_code = 75
    kind = "preempted"


class NumericsError(MeshloomError):
    """The numbers went wrong: a non-finite loss or gradient, or a failed comparison."""

    exit_code = 76
    kind = "numerics error"
