"""The section of the task `masked_lm`: which tokens are predicted, and what replaces them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.keys.key import Key
from trainer.config.sections.section import Number, Section, Share


class MaskedSection(Section):
    """The masks of the task `masked_lm`, as of transformers' DataCollatorForLanguageModeling."""

    probability: Annotated[Number, Field(gt=0, lt=1), Key(unit="share")] = 0.15
    """The probability that a token is to be predicted; special tokens never are."""
    masked: Annotated[Share, Key(unit="share")] = 0.8
    """The share of those that the mask token replaces."""
    random: Annotated[Share, Key(unit="share")] = 0.1
    """The share of those that a random token replaces; the rest stays as it is."""

    @model_validator(mode="after")
    def _whole(self) -> MaskedSection:
        if self.masked + self.random > 1:
            raise ValueError("masked and random that add up to at most 1")
        return self
