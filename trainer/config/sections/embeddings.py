"""The section of the task `embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.keys.key import Key
from trainer.config.sections.section import Count, Number, Section


class EmbeddingsSection(Section):
    """How texts become vectors, and which vectors the loss compares; words as in
    sentence-transformers.
    """

    pooling: Literal["mean", "cls", "lasttoken"] = "mean"
    """The vector of a text: the mean of its tokens' hidden states, its first one, or its last."""
    normalize: bool = False
    """True to scale each vector to length 1, in the saved model, too."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """How two vectors are compared."""
    scale: Annotated[Number, Field(gt=0, le=1e6), Key(unit="factor")] = 20.0
    """The factor of similarities, 1 / temperature; with "dot", usually 1."""
    symmetric: bool = False
    """True to find each positive's anchor, too: the mean of both losses."""
    duplicates: Literal["mask", "keep"] = "mask"
    """Texts of others that are right answers, too: no negatives, or negatives as any other.

    Those are texts equal to a sample's positive or to its anchor, and positives of an equal anchor.
    """
    columns: Annotated[list[str], Field(max_length=100)] = []
    """The columns of anchor, positive and negatives, in this order; empty: found by their names."""
    negatives: Annotated[Count | None, Key(unit="records")] = None
    """The negatives that are taken of a row's list, the first ones; None: all."""
    prompts: dict[Literal["query", "document"], str] = {}
    """Texts put before each anchor ("query"), and before all other texts ("document")."""
    include_prompt: bool = True
    """False to leave the prompt's tokens out of the pooling."""
