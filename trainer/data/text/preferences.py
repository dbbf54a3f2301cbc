"""Rows to pairs of answers: a prompt with a chosen and a rejected answer, texts or messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from os.path import commonprefix
from typing import TYPE_CHECKING, TypeGuard

from trainer.data.sources.formats import Row, short
from trainer.data.text.chats.turns import Chat, check_turns, messages_of, tools_of
from trainer.data.text.records import (
    Kind,
    Preference,
    Ranking,
    Text,
    history_of,
    missing,
    text_of,
)
from trainer.errors import DataError, Problem
from trainer.storage import Json

if TYPE_CHECKING:
    from trainer.config.sections.model_and_data import DataSection
    from trainer.config.sections.pair_losses import Ranked

MARGIN = "margin"
ANSWERS = "answers"
SCORES = "scores"
"""The columns of several answers to one prompt, the best first, or with a number for each."""
LABELLED = ("prompt", "completion", "label")
"""The columns of single answers, each labelled good or bad (KTO)."""
NO_LABELS = (
    "labelled answers, one a row: their loss (KTO) compares each with an estimate over the other "
    "answers of its micro-batch, so that its gradient depends on how a step is divided"
)


RECORDS = ("auto", "chat", "instruction")
"""The kinds of rows (`trainer.data.records`) that hold pairs of answers."""


def kinds_of_pairs(options: DataSection, ranked: Ranked = "all") -> list[Kind]:
    """Return the kinds of rows that pairs are read from, and one that is known and refused.

    That of single pairs is the first.
    """
    instructed = options.records == "instruction"
    prompt = options.prompt_column or ("instruction" if instructed else "prompt")
    both = options.chosen_column, options.rejected_column
    also = (prompt, MARGIN, "tools", "system", *(("input", "history") if instructed else ()))

    def read(row: Row) -> Preference | None:
        if options.records == "auto":
            return _pair(prompt, *both, row)
        turned = _turned(row, prompt, both, instructed)
        return None if turned is None else _pair(prompt, *both, turned)

    pairs = Kind("pairs of answers", both, read, also)
    ranking = partial(_ranking, read, (prompt, *both), ranked == "best")
    several = Kind("ranked answers", (ANSWERS,), ranking, (*also, SCORES))
    return [pairs, Kind("labelled answers", LABELLED, _labelled), several]


def _ranking(
    read: Callable[[Row], Preference | None], columns: tuple[str, str, str], best: bool, row: Row
) -> Ranking | None:
    """Return a pair for each two answers of which one is better, or of the best with each other.

    None if there are none; answers of equal scores are no pair, and an empty one is in none.
    Raises DataError.
    """
    answers = row.columns.get(ANSWERS)
    if not isinstance(answers, list) or not all(isinstance(a, str | list | dict) for a in answers):
        actual = f'column "{ANSWERS}" holds {short(repr(answers))}'
        raise DataError(Problem(row.place, actual, "a list of answers, each a text or messages"))
    prompt, *both = columns
    if any(isinstance(answer, str) for answer in answers) and row.columns.get(prompt) is None:
        raise missing(row, prompt)
    if row.columns.get(MARGIN) is not None:
        actual = f'a column "{MARGIN}" beside "{ANSWERS}"'
        raise DataError(
            Problem(row.place, actual, f'none: give "{SCORES}", or a row for each pair')
        )
    scores = _scores(row, len(answers))
    order = sorted(range(len(answers)), key=lambda number: -scores[number])
    some = [(order[0], other) for other in order[1:]] if best else combinations(order, 2)
    pairs = []
    for better, worse in some:
        if scores[better] > scores[worse]:
            pair = dict(zip(both, (answers[better], answers[worse]), strict=True))
            pairs.append(read(row._replace(columns={**row.columns, **pair})))
    kept = tuple(pair for pair in pairs if pair is not None)
    return Ranking(kept, row.place) if kept else None


def _scores(row: Row, count: int) -> list[float]:
    """Return a number for each answer, the higher the better: by default by their order."""
    scores = row.columns.get(SCORES)
    if scores is None:
        return [float(-number) for number in range(count)]
    if isinstance(scores, list) and len(scores) == count and all(map(_is_number, scores)):
        return [float(score) for score in scores]
    actual = f'column "{SCORES}" holds {short(repr(scores))}'
    raise DataError(Problem(row.place, actual, f"a list of {count} finite numbers"))


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _turned(row: Row, prompt: str, answers: tuple[str, str], instructed: bool) -> Row | None:
    """Return the row with its texts as turns of a chat; None if an answer is empty.

    The prompt is a question of the user, behind the turns of a history, and an instruction is
    followed by its input. Raises DataError.
    """
    turned = dict(row.columns)
    texts = [column for column in answers if isinstance(row.columns.get(column), str | None)]
    for column in texts:
        text = text_of(row, column) or ""
        if not text.strip():
            return None
        turned[column] = [{"role": "assistant", "content": text}]
    if instructed or (texts and not isinstance(row.columns.get(prompt), list)):
        question = text_of(row, prompt) or ""
        more = text_of(row, "input") if instructed and "input" in row.columns else None
        content = "\n".join(part for part in (question, more) if part)
        before = history_of(row) if instructed else []
        turned[prompt] = [*before, {"role": "user", "content": content}]
    return row._replace(columns=turned)


def _labelled(row: Row) -> Preference:
    hint = "Give pairs, with the columns chosen and rejected"
    raise DataError(Problem(row.place, NO_LABELS, "a chosen and a rejected answer a row", hint))


def _pair(prompt: str, chosen: str, rejected: str, row: Row) -> Preference | None:
    for column in (chosen, rejected):
        if column not in row.columns:
            raise missing(row, column)
    row = row._replace(
        columns={
            name: [value] if name in (chosen, rejected) and isinstance(value, Mapping) else value
            for name, value in row.columns.items()
        }
    )  # an answer may be one message
    better = row.columns[chosen]
    worse = row.columns[rejected]
    given = row.columns.get(prompt)
    margin = _margin(row)
    kinds = {isinstance(better, list), isinstance(worse, list)}
    if len(kinds) > 1:
        actual = f'"{chosen}" and "{rejected}" are a text and a list of messages'
        raise DataError(Problem(row.place, actual, "both of one kind"))
    if True in kinds:
        answers = [messages_of(row, name, row.columns[name]) for name in (chosen, rejected)]
        return _of_messages(row, prompt, answers, margin)
    if isinstance(given, list):
        before = messages_of(row, prompt, given)
        texts = [text_of(row, name) for name in (chosen, rejected)]
        if not all(text and text.strip() for text in texts):
            return None
        answers = [[*before, {"role": "assistant", "content": text}] for text in texts]
        return _chats(row, answers, len(before), margin)
    return _of_texts(row, prompt, (chosen, rejected), margin)


def _margin(row: Row) -> float:
    value = row.columns.get(MARGIN)
    if value is None:
        return 0.0
    if _is_number(value):
        return float(value)
    raise DataError(Problem(f"{row.place}: {MARGIN}", short(repr(value)), "a finite number"))


def _of_texts(row: Row, prompt: str, columns: tuple[str, str], margin: float) -> Preference | None:
    """Return a pair of texts; without a prompt's column, the prompt is what both begin with."""
    better, worse = (text_of(row, name) or "" for name in columns)
    before = text_of(row, prompt) if prompt in row.columns else None
    if before is None:
        before = commonprefix([better, worse])
        if not before.endswith((" ", "\n")):  # a word that both begin is a part of the answers
            before = before[: max(before.rfind(" "), before.rfind("\n")) + 1]
        better = better[len(before) :]
        worse = worse[len(before) :]
    if not better.strip() or not worse.strip():
        return None
    chosen = Text(better, before, row.place)
    return Preference(chosen, Text(worse, before, row.place), margin, row.place)


def _of_messages(row: Row, prompt: str, answers: list[list[Json]], margin: float) -> Preference:
    """Return a pair of chats; the prompt is apart, or the messages that both begin with."""
    shared = _shared(*answers)
    given = row.columns.get(prompt)
    before: list[Json] = []
    if isinstance(given, list):
        before = messages_of(row, prompt, given)
    elif given and not shared:
        before = [{"role": "user", "content": text_of(row, prompt)}]
    if before and answers[0][: len(before)] == before:
        before = []  # the answers repeat it
    system = row.columns.get("system")
    if system:
        if not isinstance(system, str) or (before or answers[0])[0]["role"] == "system":
            actual = f'column "system": {short(repr(system))}'
            raise DataError(Problem(row.place, actual, "one system text"))
        before = [{"role": "system", "content": system}, *before]
    learned_from = len(before) + shared
    return _chats(row, [[*before, *answer] for answer in answers], learned_from, margin)


def _shared(better: Sequence[Json], worse: Sequence[Json]) -> int:
    """Return the number of messages that both begin with, of which the last is no answer."""
    shorter = min(len(better), len(worse))
    count = next((turn for turn in range(shorter) if better[turn] != worse[turn]), shorter)
    while count and better[count - 1]["role"] == "assistant":
        count -= 1
    return count


def _chats(row: Row, answers: Sequence[list[Json]], learned_from: int, margin: float) -> Preference:
    tools = tools_of(row)
    chats = []
    for messages in answers:
        check_turns(row.place, messages)
        if not any(message["role"] == "assistant" for message in messages[learned_from:]):
            actual = "no answer of the assistant after what both begin with"
            raise DataError(Problem(row.place, actual, "one in both"))
        chats.append(Chat(messages, tools, learned_from, row.place))
    return Preference(chats[0], chats[1], margin, row.place)
