"""A look at samples as the model sees them, and at which of their tokens count in the loss."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from trainer.data.source import IGNORED, Source

_LINES = 8


def preview(source: Source, tokenizer: Any, count: int = 2, width: int = 100) -> str:
    """The first `count` samples, decoded: a line of at most `width` characters for each run of tokens.

    `+` marks tokens that count in the loss, `.` those that are only read.
    """
    samples = range(min(count, len(source)))
    return "\n".join(line for index in samples for line in _sample(source, index, tokenizer, width))


def _sample(source: Source, index: int, tokenizer: Any, width: int) -> list[str]:
    sample = source[index]
    counts = sample["targets"] != IGNORED
    # a target that is not counted is read all the same, as the next input
    tokens = np.append(sample["input_ids"], sample["targets"][-1:])
    marks = np.append(False, counts)[: len(tokens) if counts[-1] else -1]
    head = f"sample {index}: {len(sample['input_ids'])} tokens, {counts.sum()} count in the loss (+)"
    runs = [(mark, [at for at, _ in run]) for mark, run in groupby(enumerate(marks), key=lambda item: bool(item[1]))]
    lines = [_line("+" if mark else ".", tokenizer.decode(tokens[places].tolist()), width) for mark, places in runs]
    more = [f"    {len(lines) - _LINES} more runs"] if len(lines) > _LINES else []
    return [head, *lines[:_LINES], *more]


def _line(mark: str, text: str, width: int) -> str:
    shown = text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "→")
    room = width - len(f"  {mark} ")
    if len(shown) > room:
        half = (room - 3) // 2
        shown = shown[: room - 3 - half] + "..." + shown[len(shown) - half :]
    return f"  {mark} {shown}"
