"""Distillation, the task of documents with a teacher's likeliest tokens at each target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.sections.distillation import DistillationSection
from trainer.distributed.exchange import vocabulary_shard_of_head
from trainer.models.spec import ModelSpec
from trainer.recipes.causal_lm.task import CausalLM, head_of
from trainer.tasks.attention import Attention
from trainer.tasks.losses.cross_entropy import NO_OPTIONS, LossHead
from trainer.tasks.losses.divergences import (
    Likeliest,
    Mixed,
    linear_divergence,
    linear_likeliest,
    logits_divergence,
    logits_likeliest,
)
from trainer.tasks.task import IGNORED, Batch, Sample, changed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIGURES = ("hard_loss", "divergence", "teacher_mass")
"""The names of what is measured, means over targets: nats, nats, and the teacher's share of its
likeliest tokens."""
NOWHERE = -1
"""The place of a token that is no target."""


class DistillationTask(CausalLM):
    """The task of samples as `CausalLM` has them, with what is known of a teacher.

    A sample's `teacher` (`LikelyTokens`) has a row for each target, in order. In a micro-batch
    they follow one another, [targets, ...], and `places` [batch, longest] has each token's row.
    """

    keys: DistillationSection = DistillationSection()
    vocabulary = 0
    """The number of ids that teacher and student share."""
    measures: tuple[str, ...] = FIGURES
    figures: torch.Tensor | None = None
    """The sums of FIGURES in training since they were last taken, and the targets' number."""
    _column = 0
    _batch: Batch = {}
    _sums: torch.Tensor | None = None

    def distilling(self, keys: DistillationSection, vocabulary: int) -> DistillationTask:
        """Return the same task with the config's loss, over so many shared ids."""
        return changed(self, keys=keys, vocabulary=vocabulary)

    @property
    def width(self) -> int:
        """The numbers of a teacher at a target: ids, log p of each, of all others."""
        return 2 * self.keys.top_k + 1

    @property
    def mixed(self) -> Mixed:
        """The loss of an evaluation."""
        keys = self.keys
        return Mixed(keys.divergence, keys.beta, keys.temperature, keys.hard_weight)

    @contextmanager
    def measuring_columns(self, targets: int) -> Iterator[None]:
        """Have an evaluation measure the likeliest tokens at each of so many targets, in the place
        that `places` of the batch give it, in place of FIGURES."""
        before = self.measures
        self._column = targets
        self.measures = ("",) * (targets * self.width)
        try:
            yield
        finally:
            self._column = 0
            self.measures = before

    def _loss_head(self, own: nn.Linear) -> LossHead:
        return DistillationHead(own)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Pad samples as `CausalLM` does; `places` [batch, longest] int64, and `teacher_ids`
        [targets, k] and `teacher_logs` [targets, k + 1], at least a row, where they are known.
        """
        batch = super().collate(samples)
        counted = batch["targets"] != IGNORED
        places = (counted.flatten().cumsum(0) - 1).view_as(counted)
        if "place" in samples[0]:  # a sample's first target has this one
            before = counted.sum(1).cumsum(0) - counted.sum(1)
            first = torch.tensor([sample["place"] for sample in samples])
            places = places + (first - before)[:, None]
        batch["places"] = places.where(counted, NOWHERE)
        if "teacher" in samples[0]:
            known = [sample["teacher"] for sample in samples]
            ids = np.concatenate([one.ids for one in known])
            logs = np.concatenate([one.logs for one in known])
            if len(ids) != int(counted.sum()):
                raise ValueError("a teacher's column with another number of targets")
            missing = ((0, 1 if not len(ids) else 0), (0, 0))
            batch["teacher_ids"] = torch.from_numpy(np.pad(ids, missing))
            batch["teacher_logs"] = torch.from_numpy(np.pad(logs, missing))
        return batch

    def blank(self, sample: Sample) -> Mapping[str, object]:
        nothing = {"teacher": sample["teacher"].none()} if "teacher" in sample else {}
        return {**super().blank(sample), **nothing}

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        padded = super().padded(batches)
        for batch in padded:
            missing = batch["input_ids"].shape[1] - batch["places"].shape[1]
            batch["places"] = F.pad(batch["places"], (0, missing), value=NOWHERE)
        return padded

    def _own_places(self, batch: Batch) -> torch.Tensor:
        ranks = self._context
        places = ranks.part(batch["places"], fill=NOWHERE) if ranks else batch["places"]
        return places.flatten()

    def _teacher(self, batch: Batch) -> Likeliest:
        """Return what is known of the teacher at each of this rank's tokens; anything at others."""
        known = Likeliest(batch["teacher_ids"], batch["teacher_logs"])
        return known.at(self._own_places(batch).clamp_min(0))

    def _mixed_of(self, trains: bool) -> Mixed:
        """Return the loss, in training with smoothing, and with each token's for its source."""
        if not trains:
            return self.mixed
        observe = None if self.by_source is None else self.by_source.add
        return replace(self.mixed, smoothing=self._smoothing, observe=observe)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss; under `own_loss`, what the model adds to a micro-batch's mean is
        weighted by its targets."""
        self._batch = batch
        if self.by_source is not None and model.training:
            targets = self._own(batch, "targets")
            sources = batch["sources"].expand_as(targets)
            self.by_source.start({"targets": targets, "sources": sources})
        if self._own_loss and not self._fused_head:
            return self._own_mean(model, batch) * self.targets(batch)
        targets = self._own(batch, "targets")
        teacher = self._teacher(batch)
        mixed = self._mixed_of(model.training)
        if not self._fused_head:
            shard = vocabulary_shard_of_head(head_of(model))
            sums = logits_divergence(self.logits(model, batch), targets, teacher, mixed, shard)
            return self._noted(sums, model.training, batch)
        head = _head_of(model)
        with head.comparing(teacher, mixed):
            if self._own_loss:
                return self._own_mean(model, batch) * self.targets(batch)
            sums = head(self.hidden(model, batch), targets)
        return self._noted(sums, model.training, batch)

    def _mean(
        self, logits: torch.Tensor, labels: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch; a fused head gives the sums as `logits`."""
        sums = logits
        if not self._fused_head:
            mixed = self._mixed_of(self._trains)
            sums = logits_divergence(logits, labels, self._teacher(self._batch), mixed)
        total = self._noted(sums, self._trains, self._batch)
        return total / (labels != IGNORED).sum().clamp_min(1)

    def _noted(self, sums: torch.Tensor, trains: bool, batch: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch's sums, and keep the others."""
        figures = sums[1:].detach().double()
        if not trains:
            self._sums = figures
            return sums[0]
        every = torch.cat([figures, self.targets(batch)[None].double()])
        self.figures = every if self.figures is None else self.figures + every
        return sums[0]

    def take_figures(self) -> torch.Tensor:
        """Return, and forget, the sums of FIGURES in training, with the number of targets."""
        figures = self.figures
        self.figures = None
        return torch.zeros(len(FIGURES) + 1, dtype=torch.float64) if figures is None else figures

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss, without smoothing, and FIGURES; or, for a column, 0 and the
        likeliest tokens at each target in its place. The model is in evaluation mode.
        """
        if self._column:
            return self._measured_column(model, batch)
        loss = self.loss_sum(model, batch)
        sums = self._sums
        self._sums = None
        assert sums is not None
        return torch.cat([loss[None].double(), sums])

    def _measured_column(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        arguments = self.keys.top_k, self.vocabulary, self.keys.temperature
        if self._fused_head:
            head = _head_of(model)
            with head.searching(*arguments):
                known = head(self.hidden(model, batch), self._own(batch, "targets"))
        else:
            logits = self.logits(model, batch).flatten(0, -2)
            known = logits_likeliest(logits, *arguments, vocabulary_shard_of_head(head_of(model)))
        places = self._own_places(batch)
        known = known.where((places >= 0)[:, None], 0.0)
        column = known.new_zeros(self._column, self.width)
        column.index_add_(0, places.clamp_min(0), known)
        return torch.cat([column.new_zeros(1), column.flatten()])


class DistillationHead(LossHead):
    """An output head that, given targets, returns the sums of the loss, or a teacher's likeliest
    tokens, instead of logits."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head, NO_OPTIONS)
        self._teacher: Likeliest | None = None
        self._mixed = Mixed()
        self._search: tuple[int, int, float] | None = None

    @contextmanager
    def comparing(self, teacher: Likeliest, mixed: Mixed) -> Iterator[None]:
        """Return sums of this loss in the context."""
        self._teacher = teacher
        self._mixed = mixed
        try:
            yield
        finally:
            self._teacher = None

    @contextmanager
    def searching(self, count: int, vocabulary: int, temperature: float) -> Iterator[None]:
        """Return the likeliest tokens in the context."""
        self._search = count, vocabulary, temperature
        try:
            yield
        finally:
            self._search = None

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        targets = self._targets if targets is None else targets
        if targets is None:
            return nn.Linear.forward(self, hidden)
        if self._search is not None:
            flat = hidden.flatten(0, -2)
            return linear_likeliest(flat, self.weight, self.bias, *self._search)
        assert self._teacher is not None
        return linear_divergence(
            hidden, self.weight, self.bias, targets, self._teacher, self._mixed
        )


def _head_of(model: nn.Module) -> DistillationHead:
    return model.get_output_embeddings()  # type: ignore[operator]


def made_of(
    spec: ModelSpec,
    keys: DistillationSection,
    tokenizer: PreTrainedTokenizerBase,
    attention: Callable[[], Attention],
) -> DistillationTask:
    """Build the task of a student, or of a teacher that is measured."""
    task = DistillationTask.of(spec, tokenizer.pad_token_id or 0, attention)
    assert isinstance(task, DistillationTask)
    return task.distilling(keys, len(tokenizer))
