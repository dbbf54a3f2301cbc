"""Fill-in-the-middle: texts whose middle is moved behind the rest, as StarCoder was trained.

A text is cut at two places between its characters into prefix, middle and suffix, and becomes, with
tokens P, S and M (Bavarian et al., arXiv 2207.14255; StarCoder, arXiv 2305.06161):

    PSM:  P prefix S suffix M middle end-of-text
    SPM:  P S suffix M prefix middle end-of-text

What is drawn depends on the text's number in the data alone, so it is the same in each run, on any
number of ranks, and in each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.config.sections.fim import FimSection
from trainer.data.text.tokenizer import tokens_of
from trainer.errors import ConfigError, Problem, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""The tokens of StarCoder and Granite; Qwen2.5-Coder and CodeGemma; SantaCoder; DeepSeek-Coder;
and CodeLlama."""
_SALT = 0x66696D
"""Keeps these draws apart from others of the same numbers."""


class Pieces(NamedTuple):
    """A text that is cut in three."""

    prefix: str
    middle: str
    suffix: str
    spm: bool
    """True if the suffix is read before the prefix."""


@dataclass(frozen=True)
class FillInTheMiddle:
    """The transform of texts, with the tokenizer's tokens for it."""

    rate: float
    spm_rate: float
    ids: tuple[int, int, int]
    """The tokens before prefix, suffix and middle."""

    @classmethod
    def of(cls, section: FimSection, tokenizer: PreTrainedTokenizerBase) -> FillInTheMiddle:
        """Return the transform. Raises ConfigError if the tokenizer lacks a token for it."""
        vocabulary = tokenizer.get_vocab()
        known = [tuple(section.tokens)] if section.tokens else NAMES
        names = next((one for one in known if all(name in vocabulary for name in one)), None)
        if names is None:
            lacking = [name for name in known[0] if name not in vocabulary]
            actual = f"the tokenizer lacks {listed(lacking)}"
            expected = "a tokenizer with tokens for prefix, suffix and middle"
            hint = "" if section.tokens else "Name its own in trainer.data.fim.tokens."
            raise ConfigError(Problem("trainer.data.fim", actual, expected, hint))
        first, second, third = (vocabulary[name] for name in names)
        return cls(section.rate, section.spm_rate, (first, second, third))

    def pieces(self, number: int, text: str) -> Pieces | None:
        """Cut the text of this number; None if it stays as it is."""
        draws = np.random.default_rng([_SALT, number])
        if draws.random() >= self.rate:
            return None
        first, second = sorted(draws.integers(0, len(text) + 1, 2).tolist())
        spm = bool(draws.random() < self.spm_rate)
        return Pieces(text[:first], text[first:second], text[second:], spm)

    def encode(self, pieces: Pieces, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokenise each piece by itself, as at inference, and put them in their order."""
        before_prefix, before_suffix, before_middle = self.ids
        prefix, middle, suffix = tokens_of(tokenizer, list(pieces[:3]))["input_ids"]
        if pieces.spm:
            return [before_prefix, before_suffix, *suffix, before_middle, *prefix, *middle]
        return [before_prefix, *prefix, before_suffix, *suffix, before_middle, *middle]
