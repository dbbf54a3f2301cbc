"""A preview of samples as the model sees them, marking the label tokens."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.mixture import Source
from trainer.errors import printable
from trainer.tasks.task import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LINES = 8
"""The most lines shown of a document."""
_DOCUMENTS = 4
"""The most documents shown of a sample."""


def preview(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    numbers: Iterable[int],
    width: int = 100,
    in_full: bool = False,
) -> str:
    """Decode samples: a line of at most `width` characters for each run; `in_full` shows all.

    `+` marks label tokens, which count in the loss, `.` those that are only read. A line separates
    documents that do not attend to one another.
    """
    samples = (_sample(source, index, tokenizer, width, in_full) for index in numbers)
    return "\n".join(line for lines in samples for line in lines)


def _sample(
    source: Source, index: int, tokenizer: PreTrainedTokenizerBase, width: int, in_full: bool
) -> list[str]:
    sample = source[index]
    inputs = sample["input_ids"]
    targets = sample["targets"]
    lengths = sample.get("documents", [len(inputs)])
    size = f"{len(inputs)} tokens"
    if "documents" in sample:
        size += f" in {len(lengths)} documents"
    lines = [f"sample {index}: {size}, {(targets != IGNORED).sum()} count in the loss (+)"]
    ends = np.cumsum(lengths)[:-1]
    documents = zip(np.split(inputs, ends), np.split(targets, ends), strict=True)
    for number, parts in enumerate(documents):
        if number == _DOCUMENTS and not in_full:
            return [*lines, f"  ── {len(lengths) - number} more documents"]
        lines += [f"  ── document {number + 1}"] if number else []
        shown = _document(*parts, tokenizer, width)
        more = [f"    {len(shown) - _LINES} more runs"] if len(shown) > _LINES else []
        lines += shown if in_full else [*shown[:_LINES], *more]
    return lines


def _document(
    inputs: np.ndarray, targets: np.ndarray, tokenizer: PreTrainedTokenizerBase, width: int
) -> list[str]:
    counts = targets != IGNORED
    # a target that is not counted is still read, as the next input
    tokens = np.append(inputs, targets[-1:])
    marks = np.append(False, counts)[: len(tokens) if counts[-1] else -1]
    lines = []
    for learned, run in groupby(enumerate(marks), key=lambda item: bool(item[1])):
        text = tokenizer.decode(tokens[[at for at, _ in run]].tolist())
        lines.append(_line("+" if learned else ".", text, width))
    return lines


def _line(mark: str, text: str, width: int) -> str:
    shown = printable(text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "→"))
    room = width - len(f"  {mark} ")
    if len(shown) > room:
        half = (room - 3) // 2
        shown = shown[: room - 3 - half] + "..." + shown[len(shown) - half :]
    return f"  {mark} {shown}"
