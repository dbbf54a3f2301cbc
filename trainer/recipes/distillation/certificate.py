"""The certificate of distillation: the tiny copy of a language model, on made-up documents.

The teacher is the tiny copy before its first step, as the run's own layout measures it, with a
number added to each token's log-probability, so that it is another distribution; one process
computes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trainer.certify.case import MakeReference
from trainer.certify.one_process.options import Amend, Option
from trainer.certify.recording import Sources
from trainer.certify.tiny_run import Tiny
from trainer.config.sections.distillation import DistillationSection
from trainer.data.text.token_files import PreparedSource
from trainer.engines import Engine
from trainer.models.spec import ModelSpec
from trainer.recipe import Subject
from trainer.recipes.causal_lm.certificate import NO_SAMPLES, LanguageCase
from trainer.recipes.causal_lm.reference import Documents, LanguageReference
from trainer.recipes.causal_lm.task import CausalLM
from trainer.recipes.distillation import column
from trainer.recipes.distillation.column import LikelyTokens, TeacherColumn
from trainer.recipes.distillation.one_process import (
    DistillationReference,
    PackedDistillation,
    Taught,
    invented,
    shifted,
)
from trainer.recipes.distillation.task import DistillationTask
from trainer.tasks.task import IGNORED, Batch, Sample

NO_ROUNDING = (
    "in low precision, what is known of the teacher is taken from the run, up to rounding, and a "
    "long sequence's rounding and the temperature's effect are not compared: it proves less"
)


class CertifiedTask(DistillationTask):
    """The task, which gives sequences at edges an invented teacher."""

    def collate(self, samples: Sequence[Sample]) -> Batch:
        if not {"teacher", "place"} & samples[0].keys():
            samples = [{**sample, "teacher": self._made_up(sample)} for sample in samples]
        return super().collate(samples)

    def _made_up(self, sample: Sample) -> LikelyTokens:
        targets = np.asarray(sample["targets"])
        return LikelyTokens(
            *invented(targets[targets != IGNORED], self.keys.top_k, self.vocabulary)
        )


@dataclass(frozen=True)
class CertifiedStudent(Subject):
    """A tiny copy, whose made-up documents get their teacher from the run's own layout."""

    task: DistillationTask
    parts: dict[str, PreparedSource] = field(default_factory=dict, kw_only=True)
    """The documents: filled by the case's `rehearse`."""
    taught: Taught = field(default_factory=Taught, kw_only=True)
    """The teacher's column as the layout has measured it, for the one process."""
    counts_tokens: ClassVar[bool] = False

    @property
    def probed(self) -> CausalLM:
        plain = CausalLM.of(self.spec)
        return plain.packing() if self.packed else plain

    def before_training(self, engine: Engine, folder: Path, step: int) -> Subject:
        for part in self.parts.values():
            pieces = list(column.measure(engine, self.task, part))
            counts = np.concatenate([counts for _, counts in pieces])
            ids = np.concatenate([known.ids for known, _ in pieces])
            logs = np.concatenate([known.logs for known, _ in pieces])
            starts = np.append(0, np.cumsum(counts))
            self.taught.add(part, TeacherColumn(starts, ids, logs))
            moved = shifted(ids, logs.astype(np.float64)).astype(np.float32)
            part.add_column("teacher", TeacherColumn(starts, ids, moved))
        return self


class DistillationCase(LanguageCase):
    """The tiny copy of the config's language model, and a teacher of its documents."""

    subject: Subject

    def _subject(self, spec: ModelSpec) -> Subject:
        task = CertifiedTask.of(spec)
        assert isinstance(task, CertifiedTask)
        if self.small.low_precision:
            self.small = self.small.noting(NO_ROUNDING)
        vocabulary = spec.language.vocabulary
        own = task.distilling(keys_of(self.small, vocabulary), vocabulary)
        packed = self.small.packed
        known: Any = own.packing() if packed else own
        return CertifiedStudent(spec, known, NO_SAMPLES, packed=packed)

    def options(self, small: Tiny) -> Sequence[Option]:
        section = small.config.trainer
        keys = section.distillation
        options = list(super().options(small))
        off = {"hard_weight": 0.0} if keys.hard_weight else {}
        # in low precision, a teacher at another temperature would be another one's rounding, too
        shown = keys.temperature != 1 and not small.low_precision
        off |= {"temperature": 1.0} if shown else {}
        for key, value in off.items():
            without = keys.model_copy(update={key: value})
            trainer = section.model_copy(update={"distillation": without})
            config = replace(small.config, trainer=trainer)
            options.append(Option(f"distillation.{key}", replace(small, config=config)))
        return options

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        sources, make = super().rehearse(spec)
        assert isinstance(self.subject, CertifiedStudent)
        parts: Any = sources._asdict()
        self.subject.parts.update(parts)
        return sources, make

    def _reference(
        self, small: Tiny, amend: Amend | None = None, *, spec: ModelSpec, documents: Documents
    ) -> LanguageReference:
        kind = PackedDistillation if small.packed else DistillationReference
        own = self._copy.learner(small, amend)
        assert isinstance(self.subject, CertifiedStudent)
        reference = kind(small, spec, own, documents, self._machine.device)
        reference.teach(keys_of(small, spec.language.vocabulary), self.subject.taught)
        return reference


def keys_of(small: Tiny, vocabulary: int) -> DistillationSection:
    """Return the config's keys, with fewer likeliest tokens if the tiny copy has few tokens."""
    keys = small.config.trainer.distillation
    return keys.model_copy(update={"top_k": min(keys.top_k, vocabulary // 2)})
