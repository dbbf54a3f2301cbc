"""Preference optimisation, the task of pairs of answers: both go through one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer.config.sections.pair_losses import PairsSection
from trainer.distributed.exchange import vocabulary_shard_of_head
from trainer.errors import ConfigError, Problem
from trainer.models.spec import ModelSpec
from trainer.recipes.causal_lm.task import CausalLM, head_of
from trainer.recipes.pairs.losses import LOSSES, Answers, PairLossKind
from trainer.tasks.losses.cross_entropy import LossHead
from trainer.tasks.losses.token_losses import TokenLossHead, logits_token_losses
from trainer.tasks.task import IGNORED, Batch, Sample, changed

FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""The names of what is measured, as in TRL: means over pairs."""


class PairsTask(CausalLM):
    """The task of samples with `chosen` and `rejected`, each as `CausalLM` has them, and `margin`.

    A micro-batch of m pairs is a batch of 2 m sequences, the chosen ones first. Its loss is the sum
    over its pairs, and what a step divides by is the number of pairs. `reference` [m, 2]
    has the reference's log-probabilities, once they are known.
    """

    keys: PairsSection = PairsSection()
    _kind: PairLossKind = LOSSES["sigmoid"]
    _sft: float = 0.0
    _share: torch.Tensor | float = 0.0
    """The pairs of the step for each token of its chosen answers, times the weight of these."""
    _batch: Batch = {}
    _pairs: Answers | None = None
    _column = 0
    measures: tuple[str, ...] = FIGURES
    figures: torch.Tensor | None = None
    """The sums of FIGURES in training since they were last taken, and the number of pairs."""

    def comparing(self, keys: PairsSection) -> PairsTask:
        """Return the same task with the config's loss."""
        kind = LOSSES[keys.loss]
        sft = kind.sft_weight if keys.sft_weight is None else keys.sft_weight
        return changed(self, keys=keys, _kind=kind, _sft=sft)

    def regularised(
        self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float
    ) -> CausalLM:
        if label_smoothing:
            actual = f"{label_smoothing:g}, which smooths tokens, with pairs"
            hint = "trainer.pairs.label_smoothing is that of pairs."
            raise ConfigError(Problem("trainer.label_smoothing", actual, "0", hint))
        return super().regularised(spec, 0.0, neftune_alpha)

    @contextmanager
    def measuring_columns(self, pairs: int) -> Iterator[None]:
        """Have an evaluation measure both log-probabilities of each of `pairs` pairs, in the place
        that `places` of the batch give them, in place of FIGURES."""
        before = self.measures
        self._column = pairs
        self.measures = tuple(
            f"{side} {n}" for n in range(pairs) for side in ("chosen", "rejected")
        )
        try:
            yield
        finally:
            self._column = 0
            self.measures = before

    def started(
        self, batches: Sequence[Batch], summed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        if not self._sft:
            return
        tokens = torch.stack([self._tokens(batch).chunk(2)[0].sum() for batch in batches]).sum()
        pairs = torch.stack([self._counted(batch).sum() for batch in batches]).sum()
        counts = summed(torch.stack([tokens, pairs]).double())
        self._share = self._sft * counts[1] / counts[0].clamp_min(1)

    def _loss_head(self, own: nn.Linear) -> LossHead:
        return TokenLossHead(own)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Pad both answers of each pair, the chosen ones first: `input_ids` and `targets`
        [2 x pairs, longest], `scored` as `scored_in` has it; `margins` [pairs], and `reference` and
        `places` where a sample has them.

        Plain sequences, with which a certificate meets edges, are each compared with the next.
        """
        if "chosen" not in samples[0]:
            both = zip(samples, [*samples[1:], samples[0]], strict=True)
            samples = [{"chosen": a, "rejected": b, "margin": 0.0} for a, b in both]
        sides = [sample[side] for side in ("chosen", "rejected") for sample in samples]
        batch = super().collate(sides)
        batch["scored"] = scored_in(batch["targets"])
        batch["margins"] = torch.tensor([sample["margin"] for sample in samples])
        if "reference" in samples[0]:
            rows = [torch.as_tensor(sample["reference"]) for sample in samples]
            batch["reference"] = torch.stack(rows)
        if "place" in samples[0]:
            batch["places"] = torch.tensor([sample["place"] for sample in samples])
        if self.by_source is not None and "source" in samples[0]:
            batch["sources"] = torch.tensor([[sample["source"]] for sample in samples])
        return batch

    def blank(self, sample: Sample) -> Mapping[str, object]:
        both = {side: super(PairsTask, self).blank(sample[side]) for side in ("chosen", "rejected")}
        return {**sample, **both}

    def targets(self, batch: Batch) -> torch.Tensor:
        """Count the pairs; of ranks that share sequences, the first has them all."""
        return self._once(self._counted(batch).sum())

    def _counted(self, batch: Batch) -> torch.Tensor:
        """Return the pairs that count, bool [pairs]: all but blank ones."""
        return (batch["targets"] != IGNORED).any(1).chunk(2)[0]

    def _tokens(self, batch: Batch) -> torch.Tensor:
        """Return the scored tokens of each answer, [2 x pairs]."""
        return (batch["targets"] != IGNORED).sum(1)

    def _once(self, value: torch.Tensor) -> torch.Tensor:
        """Return what ranks that share sequences all have, on the first, and zeros elsewhere."""
        ranks = self._context
        return value if not ranks or ranks.rank == 0 else torch.zeros_like(value)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss of the pairs, and the weighted cross-entropy of chosen answers.

        Under `own_loss`, what the model adds to a micro-batch's mean is weighted by its pairs.
        """
        self._batch = batch
        if self._own_loss:
            return self._own_mean(model, batch) * self.targets(batch)
        return self._compared(self._token_losses(model, batch), batch)

    def _token_losses(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of each of this rank's tokens, [2 x pairs, sequence]."""
        targets = self._own(batch, "targets")
        if self._fused_head and self._context:
            return head_of(model)(self.hidden(model, batch), targets)  # type: ignore[no-any-return]
        if self._fused_head:
            row, column = batch["scored"].unbind(1)
            places = row * targets.shape[1] + column
            # prompts and padding do not go through the head
            hidden = self.hidden(model, batch).flatten(0, 1).index_select(0, places)
            losses = head_of(model)(hidden, targets.flatten()[places])
            every = losses.new_zeros(targets.numel())
            return every.scatter(0, places, losses).view_as(targets)  # type: ignore[no-any-return]
        logits = self.logits(model, batch)
        return logits_token_losses(logits, targets, vocabulary_shard_of_head(head_of(model)))

    def _mean(
        self, logits: torch.Tensor, labels: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Return the mean loss of the pairs; a fused head gives the tokens' losses as `logits`."""
        losses = logits if self._fused_head else logits_token_losses(logits, labels)
        total = self._compared(losses.view_as(labels), self._batch)
        return total / self._counted(self._batch).sum().clamp_min(1)

    def pairs_of(self, losses: torch.Tensor, batch: Batch) -> Answers:
        """Sum the tokens' losses [2 x pairs, sequence] to what is known of each pair.

        Over the ranks that share sequences, in float64: a margin is the difference of large sums.
        """
        sums = -losses.double().sum(1)
        sums = self._context.summed(sums) if self._context else sums
        reference = batch.get("reference") if self._kind.has_reference else None
        known = sums.new_zeros(len(sums) // 2, 2) if reference is None else reference.double()
        chosen, rejected = sums.chunk(2)
        return self._answers(torch.stack([chosen, rejected], 1), known, batch)

    def _compared(self, losses: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the summed loss of the pairs, from the losses of this rank's tokens.

        In training with the cross-entropy of the chosen answers, whose weight is that of a step.
        """
        pairs = self.pairs_of(losses, batch)
        each = self._kind.compute(pairs, self.keys).where(self._counted(batch), 0.0)
        if torch.is_grad_enabled():
            each = each - self._share * pairs.chosen if self._sft else each
            self._note(pairs, each.detach(), batch)
        else:
            self._pairs = pairs
        total = each.sum().to(losses.dtype)
        # each rank that shares the sequences has the gradient of its tokens, and one has the value
        return total + (self._once(total) - total).detach()

    def losses_at(self, log_probabilities: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss of each pair whose answers have these log-probabilities, [pairs, 2]."""
        known = batch["reference"].double()
        return self._kind.compute(self._answers(log_probabilities, known, batch), self.keys)

    def _answers(self, sums: torch.Tensor, reference: torch.Tensor, batch: Batch) -> Answers:
        """Return what a loss takes, of log-probabilities and those of the reference [pairs, 2]."""
        chosen, rejected = sums.double().unbind(1)
        chosen_reference, rejected_reference = reference.unbind(1)
        chosen_tokens, rejected_tokens = self._tokens(batch).double().chunk(2)
        margins = batch["margins"].double()
        return Answers(
            chosen,
            rejected,
            chosen_reference,
            rejected_reference,
            chosen_tokens,
            rejected_tokens,
            margins,
        )

    def _note(self, pairs: Answers, losses: torch.Tensor, batch: Batch) -> None:
        """Add the figures of a micro-batch in training, and its losses by source."""
        sums = self._once(self._sums(pairs, batch))
        self.figures = sums if self.figures is None else self.figures + sums
        if self.by_source is not None:
            counted = torch.where(self._counted(batch), 0, IGNORED)[:, None]
            self.by_source.start({"targets": counted, "sources": batch["sources"]})
            self.by_source.add(slice(None), self._once(losses))

    def _sums(self, pairs: Answers, batch: Batch) -> torch.Tensor:
        """Return the sums of FIGURES, and the number of pairs, float64 [1 + FIGURES]."""
        chosen = self.keys.beta * pairs.chosen_ratio.detach()
        rejected = self.keys.beta * pairs.rejected_ratio.detach()
        if self._kind.means:
            chosen = chosen / pairs.chosen_tokens.clamp_min(1)
            rejected = rejected / pairs.rejected_tokens.clamp_min(1)
        logps = pairs.chosen.detach(), pairs.rejected.detach()
        ones = torch.ones_like(chosen)
        every = [chosen, rejected, chosen - rejected, (chosen > rejected).double(), *logps, ones]
        return torch.stack(every).where(self._counted(batch), 0.0).sum(1)

    def take_figures(self) -> torch.Tensor:
        """Return, and forget, the sums of FIGURES in training, with the number of pairs."""
        figures = self.figures
        self.figures = None
        return torch.zeros(len(FIGURES) + 1, dtype=torch.float64) if figures is None else figures

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss, without the chosen answers' cross-entropy, and FIGURES; or, for
        a column, both log-probabilities of each pair in its place. The model is in evaluation mode.
        """
        loss = self.loss_sum(model, batch).double()
        pairs = self._pairs
        self._pairs = None
        assert pairs is not None
        if not self._column:
            return torch.cat([loss[None], self._once(self._sums(pairs, batch)[:-1])])
        both = torch.stack([pairs.chosen, pairs.rejected], 1).where(
            self._counted(batch)[:, None], 0
        )
        column = both.new_zeros(self._column, 2).index_add(0, batch["places"], both)
        return torch.cat([loss[None], self._once(column.flatten())])


def scored_in(targets: torch.Tensor) -> torch.Tensor:
    """Return the row and column of each of the targets [batch, sequence] that counts, [scored, 2].

    On the host: on a device, how many there are would have to be waited for.
    """
    return (targets != IGNORED).nonzero()
