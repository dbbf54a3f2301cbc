"""The section of fill-in-the-middle."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.config.keys.key import Key
from trainer.config.sections.section import Section, Share


class FimSection(Section):
    """Fill-in-the-middle: texts of which a part in the middle is asked for after the rest.

    A text is cut at two places, drawn from its number in the data (arXiv 2207.14255, 2305.06161).
    """

    rate: Annotated[Share, Key(unit="share")] = 0.5
    """The share of the texts that are cut; the others stay as they are."""
    spm_rate: Annotated[Share, Key(unit="share")] = 0.5
    """The share of these with the suffix before the prefix (SPM), not after it (PSM)."""
    tokens: Annotated[list[str], Field(min_length=3, max_length=3)] | None = None
    """The tokens before prefix, suffix and middle; None: the tokenizer's, by their usual names."""
