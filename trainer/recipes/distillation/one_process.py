"""The one process of distillation, with whole logits and plain sums, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.expected import IGNORED, Figure, Judged, MicroBatch
from trainer.certify.parameters import Learner
from trainer.certify.recording import State
from trainer.certify.tiny_run import Tiny
from trainer.config.sections.distillation import DistillationSection
from trainer.data.text.token_files import PreparedSource
from trainer.models.spec import ModelSpec
from trainer.recipes.causal_lm.reference import (
    Documents,
    LanguageReference,
    PackedReference,
    Sample,
)
from trainer.recipes.distillation.column import LikelyTokens, TeacherColumn

ALIKE = 1e-4
ALIKE_IN_LOW = 0.1
"""By how much log-probabilities of a run's teacher may differ from one process's, so that its
likeliest tokens are taken for those: of equally likely ones, rounding decides which are."""


@dataclass
class Taught:
    """The teacher's column as a layout has measured it, by the tokens of each document."""

    rows: dict[bytes, LikelyTokens] = field(default_factory=dict)

    def add(self, part: PreparedSource, column: TeacherColumn) -> None:
        """Add the column of a part, document by document."""
        for number in range(len(part)):
            sample = part[number]
            whole = sample["input_ids"]
            known = column[number]
            start = 0
            used = 0
            for length in sample.get("documents", np.array([len(whole)])).tolist():
                targets = sample["targets"][start : start + length]
                count = int((targets != IGNORED).sum())
                rows = slice(used, used + count)
                key = whole[start : start + length].astype(np.int64).tobytes()
                self.rows[key] = LikelyTokens(known.ids[rows], known.logs[rows])
                start += length
                used += count


class Pupil(NamedTuple):
    """The targets of a micro-batch, and whether its teacher is invented, as at edges."""

    targets: torch.Tensor
    invented: bool


def shift_of(ids: np.ndarray) -> np.ndarray:
    """Return what is added to the log-probability of a token, a number between -1 and 1."""
    return np.sin(3.0 * ids + 1.0)


def shifted(ids: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Return another distribution over the same outcomes, float64 [n, k + 1]."""
    moved = logs.copy()
    moved[:, :-1] += shift_of(ids)
    return moved - np.logaddexp.reduce(moved, 1, keepdims=True)


def invented(targets: np.ndarray, count: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest tokens of a teacher that is a function of the target alone."""
    ids = (targets[:, None] + np.arange(count)) % vocabulary
    logs = shifted(ids, np.zeros((len(ids), count + 1)))
    return ids.astype(np.int32), logs.astype(np.float32)


class _Distilled(LanguageReference):
    """One process with the whole tiny language model, and what a teacher says of its targets."""

    def __init__(
        self, small: Tiny, spec: ModelSpec, own: Learner, documents: Documents, device: torch.device
    ) -> None:
        # before hooks listen to its modules
        self._teacher = copy.deepcopy(own.model).to(device).eval()
        self._taught = Taught()
        self._at_edge = False
        self._known: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}
        self._keys = small.config.trainer.distillation
        super().__init__(small, spec, own, documents, device)
        self._tops = ()  # it measures numbers, and counts no targets

    def teach(self, keys: DistillationSection, taught: Taught) -> None:
        """Take the settings, and what the run has measured, once it has."""
        self._keys = keys
        self._taught = taught

    def held_out(self, state: State) -> Judged:
        judged = super().held_out(state)
        return judged._replace(figures=self._figures())

    def parts_at(self, edge: Edge, step: int) -> list[MicroBatch]:
        self._at_edge = True
        try:
            return super().parts_at(edge, step)
        finally:
            self._at_edge = False

    def _collated(self, samples: Sequence[Sample], width: int = 0) -> tuple[torch.Tensor, Pupil]:
        inputs, targets = super()._collated(samples, width)
        return inputs, Pupil(targets, self._at_edge)

    def _counted(self, inputs: torch.Tensor, targets: Pupil) -> int:
        return int((targets.targets != IGNORED).sum())

    def _loss_sum(self, model: nn.Module, inputs: torch.Tensor, targets: Pupil) -> torch.Tensor:
        """Return the summed loss, and what the model adds to a micro-batch's, for each target."""
        keys = self._keys
        hard, soft, _ = self._sums(model, inputs, targets)
        weight = keys.hard_weight
        total = (1 - weight) * keys.temperature**2 * soft + weight * hard
        counted = self._counted(inputs, targets)
        if not (self._adds_to_loss and counted):
            return total
        labels = targets.targets
        own = model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False)
        plain = F.cross_entropy(own.logits.float().flatten(0, 1), labels.flatten())
        return total + (own.loss - plain) * counted  # type: ignore[no-any-return]

    def _sums(
        self, model: nn.Module, inputs: torch.Tensor, pupil: Pupil
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the summed cross-entropy and divergence, and the teacher's share of its likeliest
        tokens: float64."""
        counted = pupil.targets != IGNORED
        logits = self._output(model, inputs)[counted].double()
        targets = pupil.targets[counted]
        smoothing = self._smoothing if model.training else 0.0
        hard = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        ids, p = self._teacher_of(inputs, pupil)
        q = torch.log_softmax(logits / self._keys.temperature, -1)
        others = q.scatter(1, ids, -torch.inf)
        q = torch.cat([q.gather(1, ids), others.logsumexp(1, keepdim=True)], 1)
        return hard, self._divergence(p, q), (1 - p[:, -1].exp()).sum()

    def _divergence(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the summed divergence of log-probabilities."""

        def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return F.kl_div(other, one, reduction="sum", log_target=True)

        if self._keys.divergence == "forward":
            return kl(p, q)
        if self._keys.divergence == "reverse":
            return kl(q, p)
        beta = self._keys.beta
        mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)

    def _teacher_of(self, inputs: torch.Tensor, pupil: Pupil) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens at the targets of a micro-batch, and log p, float64."""
        targets = pupil.targets.cpu().numpy()
        device = self._device
        if pupil.invented:
            known = targets[targets != IGNORED]
            ids, logs = invented(known, self._keys.top_k, self._spec.language.vocabulary)
            return torch.from_numpy(ids).long().to(device), torch.from_numpy(logs).double().to(
                device
            )
        key = inputs.cpu().numpy().tobytes() + targets.tobytes()
        if key not in self._known:
            self._known[key] = self._computed(inputs, targets)
        return self._known[key]

    def _computed(
        self, inputs: torch.Tensor, targets: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits = self._output(self._teacher, inputs).double() / self._keys.temperature
        every = torch.log_softmax(logits, -1).cpu()
        rows = []
        for whole, own, of_row in zip(inputs.cpu().numpy(), every, targets, strict=True):
            length = int((whole != 0).sum())
            document = whole[:length].astype(np.int64).tobytes()
            logs = own[torch.from_numpy(of_row != IGNORED)]
            rows.append(self._likeliest(logs, self._taught.rows.get(document)))
        ids = torch.cat([one for one, _ in rows])
        logs = torch.cat([one for _, one in rows])
        moved = torch.from_numpy(shifted(ids.numpy(), logs.numpy()))
        return ids.to(self._device), moved.to(self._device)

    def _likeliest(
        self, every: torch.Tensor, measured: LikelyTokens | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens of all log-probabilities [n, v], and their own [n, k + 1].

        They are those of the run, unless these are less likely than rounding explains.
        """
        count = self._keys.top_k
        best, ids = every.topk(count, 1)
        low = self.small.low_precision or self._layout.float8 != "none"
        if measured is not None and measured.ids.shape == ids.shape:
            alike = ALIKE_IN_LOW if low else ALIKE
            theirs = torch.from_numpy(measured.ids).long()
            own = every.gather(1, theirs)
            apart = (own.sort(1, descending=True).values - best).abs()
            distinct = all(len(set(row)) == count for row in theirs.tolist())
            if distinct and not bool((apart > alike).any()):
                ids = theirs
                logs = torch.from_numpy(measured.logs).double()
                if low and not bool(((logs[:, :-1] - own).abs() > alike).any()):
                    return ids, logs
        others = every.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        return ids, torch.cat([every.gather(1, ids), others], 1)

    def _figures(self) -> tuple[Figure, ...]:
        """Return the sums of the task's measures over the held-out samples, in its order."""
        samples = self._evaluated_samples()
        if samples and isinstance(samples[0], list):
            samples = [document for pack in samples for document in pack]
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        counted = 0
        with torch.no_grad():
            for sample in samples:
                inputs, pupil = self._collated([sample])
                totals += torch.stack([one.cpu() for one in self._sums(self.model, inputs, pupil)])
                counted += self._counted(inputs, pupil)
        self.model.train()
        hard, soft, share = totals.tolist()
        # a divergence is a difference of cross-entropies, of about a nat each
        return (Figure(hard, hard), Figure(soft, soft + counted), Figure(share, float(counted)))


class DistillationReference(_Distilled):
    """A sample for each document."""


class PackedDistillation(_Distilled, PackedReference):
    """A sample is a list of documents, each a micro-batch of its own."""
