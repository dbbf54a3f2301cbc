"""The section of the task `labels`: which labels there are, and how they are read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.keys.key import Key
from trainer.config.sections.section import Number, Section


class LabelsSection(Section):
    """The labels of texts or tokens, or pairs of answers, for the task `labels`."""

    kind: Literal["auto", "single", "multi", "regression", "tokens", "reward"] = "auto"
    """One class, several, numbers, a class a token, or rewards; auto: by the columns and labels."""
    label_column: str | None = None
    """The column of labels; None: "label" or "labels", of tokens also "ner_tags", "pos_tags" or
    "tags"."""
    pair_column: str | None = None
    """The column of a second text, for labels of pairs of texts."""
    names: Annotated[list[str], Field(max_length=100_000)] = []
    """The names of classes in the order of their numbers; empty: the base's, or the data's."""
    centring: Annotated[Number, Field(ge=0, le=1e6), Key(unit="factor")] = 0.0
    """The factor of (r + s)^2 in the loss of rewards r and s of two answers; 0: none."""
