"""The one process of preference optimisation, with whole logits and plain sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.certify.one_process.expected import IGNORED, Figure, Judged, MicroBatch
from trainer.certify.one_process.factors import lowered
from trainer.certify.parameters import Learner
from trainer.certify.recording import Sources, State
from trainer.certify.tiny_run import Tiny
from trainer.data.text.token_files import Encoded
from trainer.models.spec import ModelSpec
from trainer.recipes.causal_lm.reference import LanguageReference, Sample, sample_of
from trainer.recipes.pairs.losses import LOSSES, Answers


class Drawn(NamedTuple):
    """Made-up pairs, and what is added to the reference of each."""

    chosen: list[Encoded]
    rejected: list[Encoded]
    shifts: np.ndarray
    """The numbers added to both log-probabilities of the reference, float64 [pairs, 2]."""
    margins: np.ndarray


class Pair(NamedTuple):
    chosen: Sample
    rejected: Sample
    reference: np.ndarray
    low: np.ndarray
    """The reference as it is computed in the run's precision, float64 [2]."""
    margin: float


class Compared(NamedTuple):
    """The numbers that the loss of a micro-batch takes besides its tokens."""

    targets: torch.Tensor
    """[2 x pairs, sequence], the chosen answers first."""
    reference: torch.Tensor
    low: torch.Tensor
    margins: torch.Tensor


class PreferenceReference(LanguageReference):
    """One process with the whole tiny language model, on pairs."""

    def __init__(
        self,
        small: Tiny,
        spec: ModelSpec,
        own: Learner,
        pairs: Sequence[Drawn],
        device: torch.device,
    ) -> None:
        self._keys = small.config.trainer.pairs
        self._kind = LOSSES[self._keys.loss]
        weight = self._keys.sft_weight
        self._sft = self._kind.sft_weight if weight is None else weight
        self._share = 0.0
        drawn: Any = pairs
        super().__init__(small, spec, own, drawn, device)
        parts = zip(self._data, pairs, strict=True)
        self._tops = ()  # it measures numbers, and counts no targets
        self._data = Sources(*(self._referring(*part) for part in parts))

    def held_out(self, state: State) -> Judged:
        judged = super().held_out(state)
        return judged._replace(figures=self._figures(self._evaluated_samples()))

    def _prepared(self, documents: Drawn, longest: int) -> list[Pair]:  # type: ignore[override]
        """Return the pairs that were drawn, without their reference."""
        margins = documents.margins.tolist()
        sides = zip(documents.chosen, documents.rejected, margins, strict=True)
        nothing = np.zeros(2)
        return [
            Pair(sample_of(chosen, longest), sample_of(rejected, longest), nothing, nothing, margin)
            for chosen, rejected, margin in sides
        ]

    def _referring(self, pairs: Any, drawn: Drawn) -> list[Pair]:
        """Return pairs with their reference: by the initial weights, in evaluation.

        A model in low precision is compared with itself in it: its rounding is in both sums.
        """
        if not self._kind.has_reference:
            return list(pairs)
        exact = self._references(self.model, pairs, drawn)
        low = exact
        if self.small.low_precision:
            dtype = getattr(torch, self._layout.precision)
            low = self._references(lowered(self.model, dtype, self._layout.float8), pairs, drawn)
        known = zip(pairs, exact, low, strict=True)
        return [pair._replace(reference=one, low=other) for pair, one, other in known]

    def _references(
        self, model: nn.Module, pairs: Sequence[Pair], drawn: Drawn
    ) -> list[np.ndarray]:
        """Return both log-probabilities of each pair, with what is added to them."""
        model.eval()
        with torch.no_grad():
            sums = [self._sums(model, *self._collated([pair])) for pair in pairs]
        model.train()
        return [both.cpu().numpy() + drawn.shifts[n] for n, both in enumerate(sums)]

    def _sums(self, model: nn.Module, inputs: torch.Tensor, compared: Compared) -> torch.Tensor:
        """Return the log-probability of each answer, float64 [2 x pairs]."""
        logits = self._output(model, inputs).double()
        counted = compared.targets != IGNORED
        wanted = compared.targets.clamp_min(0)[..., None]
        each = torch.log_softmax(logits, -1).gather(-1, wanted)[..., 0]
        return each.where(counted, 0.0).sum(1)

    def _blank(self, sample: Pair) -> Pair:
        blank = super()._blank
        return sample._replace(chosen=blank(sample.chosen), rejected=blank(sample.rejected))

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        parts = self._samples(step, data_rank)
        sides = [side for part in parts for pair in part for side in pair[:2]]
        longest = max(len(inputs) for inputs, _ in sides)
        width = longest if self._draws else 0  # what is drawn depends on it, so a step has one
        return [
            MicroBatch(data_rank, i, *self._collated(part, width), 0, self._shared(longest))
            for i, part in enumerate(parts)
        ]

    def _parts_of(self, rank: int, number: int, rows: list[list[Sample]]) -> list[MicroBatch]:
        """Return a micro-batch in which each row is compared with the next."""
        own = [row[0] for row in rows]
        both = zip(own, [*own[1:], own[0]], strict=True)
        nothing = np.zeros(2)
        pairs = [Pair(chosen, rejected, nothing, nothing, 0.0) for chosen, rejected in both]
        return [MicroBatch(rank, number, *self._collated(pairs))]

    def _collated(self, samples: Sequence[Pair], width: int = 0) -> tuple[torch.Tensor, Compared]:
        sides = [pair.chosen for pair in samples] + [pair.rejected for pair in samples]
        inputs, targets = super()._collated(sides, width)
        exact = np.array([pair.reference for pair in samples])
        low = np.array([pair.low for pair in samples])
        margins = np.array([pair.margin for pair in samples])
        numbers = map(torch.from_numpy, (exact, low, margins))
        return inputs, Compared(targets, *(values.to(self._device) for values in numbers))

    def _answers(self, model: nn.Module, sums: torch.Tensor, compared: Compared) -> Answers:
        tokens = (compared.targets != IGNORED).sum(1).double()
        reference = compared.reference if model is self.model else compared.low
        known = [*sums.chunk(2), *reference.unbind(1), *tokens.chunk(2)]
        return Answers._make([*known, compared.margins])

    def _loss_sum(self, model: nn.Module, inputs: torch.Tensor, targets: Compared) -> torch.Tensor:
        """Return the loss of the pairs, the chosen answers' cross-entropy in training, and what
        the model adds to a micro-batch's loss, for each pair."""
        counted = self._has_targets(targets)
        sums = self._sums(model, inputs, targets)
        answers = self._answers(model, sums, targets)
        total = self._kind.compute(answers, self._keys)[counted].sum()
        if model.training and self._sft:
            total = total - self._share * answers.chosen[counted].sum()
        return total + self._added(model, inputs, targets) if self._adds_to_loss else total

    def _added(self, model: nn.Module, inputs: torch.Tensor, compared: Compared) -> torch.Tensor:
        """Return what the model's own loss has beside the mean of its tokens, for each pair."""
        targets = compared.targets
        own = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False)
        plain = cross_entropy(own.logits.float().flatten(0, 1), targets.flatten())
        return (own.loss - plain) * self._counted(inputs, compared)  # type: ignore[no-any-return]

    def _has_targets(self, compared: Compared) -> torch.Tensor:
        return (compared.targets != IGNORED).any(1).chunk(2)[0]

    def _counted(self, inputs: torch.Tensor, targets: Compared) -> int:
        return int(self._has_targets(targets).sum())

    def _count(self, parts: Iterable[MicroBatch]) -> int:
        """Count the pairs of a step, and its pairs for each token of a chosen answer."""
        parts = list(parts)
        pairs = super()._count(parts)
        chosen = [part.targets.targets.chunk(2)[0] for part in parts]
        tokens = sum(int((targets != IGNORED).sum()) for targets in chosen)
        self._share = self._sft * pairs / max(tokens, 1)
        return pairs

    def _figures(self, samples: Sequence[Pair]) -> tuple[Figure, ...]:
        """Return the sums of the task's measures over the held-out pairs, in its order."""
        self.model.eval()
        rows = []
        with torch.no_grad():
            for pair in samples:
                inputs, compared = self._collated([pair])
                sums = self._sums(self.model, inputs, compared)
                rows.append(self._figures_of(self._answers(self.model, sums, compared)))
        self.model.train()
        totals, scales = torch.stack(rows).sum(0)
        return tuple(map(Figure, totals.tolist(), scales.tolist()))

    def _figures_of(self, one: Answers) -> torch.Tensor:
        """Return each figure of a pair, and the size of its terms, [2, figures]."""
        tokens = (one.chosen_tokens, one.rejected_tokens) if self._kind.means else (1.0, 1.0)
        beta = self._keys.beta
        chosen = beta * (one.chosen - one.chosen_reference) / tokens[0]
        rejected = beta * (one.rejected - one.rejected_reference) / tokens[1]
        terms = one.chosen, one.rejected, one.chosen_reference, one.rejected_reference
        sizes = [beta * torch.stack(terms).abs().sum(0)] * 3
        values = [chosen, rejected, chosen - rejected, (chosen > rejected).double()]
        values += [one.chosen, one.rejected]
        sizes += [torch.ones_like(chosen), one.chosen.abs(), one.rejected.abs()]
        return torch.stack([torch.cat(values), torch.cat(sizes)])
