"""A sample of text at the end of a run, for the user to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.data.mixture import Source
from trainer.errors import ConfigError
from trainer.models.opened import opened
from trainer.tasks.generation import continued
from trainer.tasks.task import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FEW = 8
"""The number of tokens at the beginning of a text that a model continues."""


def beginning(source: Source, most: int) -> list[int]:
    """Return the tokens before the first target: at least a few, and at most the last `most`."""
    sample = source[0]
    counted = np.flatnonzero(sample["targets"] != IGNORED)
    first = int(counted[0]) + 1 if len(counted) else 0
    return [int(token) for token in sample["input_ids"][: max(first, FEW)]][-max(most, 1) :]


def continuation(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[int],
    tokens: int,
    trust: bool,
) -> str:
    """Return how the model in `folder` continues `prompt`; `trust`: its own code may run."""
    model: PreTrainedModel = opened(folder, trust_remote_code=trust)
    if not model.can_generate():
        return f"(no sample: {type(model).__name__} has no method to generate text)"
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            written = continued(model, tokenizer, prompt, tokens)
    except ConfigError as error:
        return f"(no sample: {error})"
    return str(tokenizer.decode(written, skip_special_tokens=True))
