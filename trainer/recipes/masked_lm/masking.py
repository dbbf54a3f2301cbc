"""Masked samples: which tokens are predicted, and what stands in their places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.data.mixture import Source, sample_of
from trainer.distributed.seeding import derive
from trainer.tasks.task import IGNORED, Sample

HELD_OUT = -1
"""The epoch of an evaluation, whose masks are always the same."""


@dataclass(frozen=True)
class MaskRule:
    """How tokens are masked: BERT's rule (arXiv 1810.04805, section 3.1)."""

    probability: float
    """The probability that a token is to be predicted."""
    masked: float
    """The share of those that the mask token replaces."""
    random: float
    """The share of those that a random token replaces; the rest stays as it is."""
    mask_token: int
    vocabulary: int
    """The number of tokens among which a random one is drawn."""
    special: frozenset[int]
    """The tokens that are never predicted."""

    @property
    def key(self) -> list[object]:
        """A value that two rules share only if they mask alike."""
        shares = [self.probability, self.masked, self.random]
        return [*shares, self.mask_token, self.vocabulary, sorted(self.special)]

    def apply(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what stands in place of tokens [n], and the targets [n], IGNORED elsewhere.

        It is `DataCollatorForLanguageModeling.numpy_mask_tokens` of transformers, draw by draw. But
        if no token of a sample is drawn, it is drawn again, so that each sample has a target.
        """
        free = ~np.isin(tokens, list(self.special))
        inputs = tokens.astype(np.int64)
        targets = np.full_like(inputs, IGNORED)
        if not free.any():
            return inputs, targets
        chances = np.where(free, self.probability, 0.0)
        chosen = np.zeros_like(free)
        while not chosen.any():
            chosen = generator.binomial(1, chances).astype(bool)
        targets[chosen] = inputs[chosen]
        masked = generator.binomial(1, self.masked, len(inputs)).astype(bool) & chosen
        inputs[masked] = self.mask_token
        if self.masked == 1 or self.random == 0:
            return inputs, targets
        share = self.random / (1 - self.masked)
        other = generator.binomial(1, share, len(inputs)).astype(bool) & chosen & ~masked
        inputs[other] = generator.integers(0, self.vocabulary, np.count_nonzero(other))
        return inputs, targets


class Masked:
    """Samples of tokens, masked differently in each epoch.

    The mask is a function of seed, sample and epoch alone: ranks, micro-batches and a resumed run
    see the same.
    """

    def __init__(self, source: Source, rule: MaskRule, seed: int) -> None:
        self._source = source
        self._rule = rule
        self._seed = seed

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        """Return a sample as in an evaluation."""
        return self._masked(self._source[index], index, HELD_OUT)

    def in_epoch(self, index: int, epoch: int) -> Sample:
        return self._masked(sample_of(self._source, index, epoch), index, epoch)

    def _masked(self, sample: Sample, index: int, epoch: int) -> Sample:
        generator = np.random.default_rng(derive("mask", self._seed, index, epoch))
        inputs, targets = self._rule.apply(sample["input_ids"], generator)
        return {"input_ids": inputs, "labels": targets}


class WholeTexts:
    """Padded samples with their last token, of which a next-token sample has the target alone.

    A text that is cut still ends with the token that ends texts, as by the tokenizer itself.
    """

    def __init__(self, source: Source, length: int, end: int) -> None:
        """`length`: the tokens of a text that may have been cut."""
        self._source = source
        self._length = length
        self._end = end

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        return self._whole(self._source[index])

    def in_epoch(self, index: int, epoch: int) -> Sample:
        return self._whole(sample_of(self._source, index, epoch))

    def _whole(self, sample: Sample) -> Sample:
        tokens = np.append(sample["input_ids"], sample["targets"][-1])
        if len(tokens) == self._length:
            tokens[-1] = self._end
        return {"input_ids": tokens}
