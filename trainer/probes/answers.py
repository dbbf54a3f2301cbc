"""The answers of one model to all questions, also to those that its layout does not need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.errors import MeshloomError
from trainer.probes.findings import learned
from trainer.probes.question import Probed, Question, ask


@dataclass(frozen=True)
class Answer:
    """The answer to one question about a model."""

    question: str
    """The question in words, as `Question.name`."""
    answer: Literal["ok", "note", "none"]
    """`note`: it does not hold, or is to be known. `none`: it can't be asked of such a model."""
    actual: str
    """The finding, for a note."""
    applies: bool
    """False if the layout does not need the answer; it then says what another layout would meet."""
    who: str
    """The models, layouts or options that need the answer."""

    def __str__(self) -> str:
        if self.answer == "none":
            return f"for {self.who}"
        scope = "" if self.applies else "does not apply to this layout"
        return "; ".join(filter(None, (self.actual, scope)))


def answer(question: Question, about: Probed, check: Callable[[Probed], None]) -> Answer:
    """Ask a question for the model's own layout, or under its example if that does not need it.

    Learns what is found. `check(about)` raises ConfigError for what the findings so far rule out
    under a layout.
    """
    applies = question.need.met(about)
    under = about if applies else question.need.example(about)
    if under is None:
        return Answer(question.name, "none", "", applies, question.need.who)
    before = about.findings
    try:
        if not applies:
            check(under)
        ask(question, under)
        actual = "; ".join(learned(before, about.findings))
    except MeshloomError as error:
        actual = "; ".join(problem.actual for problem in error.problems)
    return Answer(question.name, "note" if actual else "ok", actual, applies, question.need.who)
