"""The subject of distillation: a language model, its documents, and a teacher's column."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.config.sections.distillation import DistillationSection
from trainer.config.sections.trainer import TrainerSection
from trainer.data import columns
from trainer.engines import Engine, Metrics
from trainer.errors import ConfigError, Problem
from trainer.recipe import RunContext, Subject
from trainer.recipes.causal_lm.subject import LanguageSubject
from trainer.recipes.causal_lm.task import CausalLM
from trainer.recipes.distillation import column
from trainer.recipes.distillation.task import FIGURES, DistillationTask
from trainer.recipes.distillation.teacher import (
    KEY,
    column_folder,
    known_of,
    known_of_teacher,
    open_fitted,
    spec_of_teacher,
)
from trainer.storage import Json


@dataclass(frozen=True)
class StudentSubject(LanguageSubject):
    """A causal language model on documents, with a teacher's likeliest tokens."""

    task: DistillationTask
    section: TrainerSection = TrainerSection()

    @property
    def probed(self) -> CausalLM:
        """Next-token prediction: what a layout asks of the model does not depend on the loss."""
        plain = CausalLM.of(self.spec, attention=self.task.attention)
        return plain.packing() if self.packed else plain

    def measures(self, loss: float) -> dict[str, float]:
        return {}

    def training_figures(self, metrics: Metrics, device: torch.device) -> dict[str, float]:
        sums = self.task.take_figures()
        means = metrics.means(sums, device)
        return dict(zip(FIGURES, means.tolist(), strict=True))

    def before_training(self, engine: Engine, folder: Path, step: int) -> Subject:
        """Read what is known of the teacher. Collective.

        Raises DataError if it is missing, damaged, or of another teacher, data or settings.
        """
        job = engine.job
        ranks = job.machine.ranks
        place = column_folder(self.section, folder)

        def expected() -> Json:
            known = known_of(self.task.keys, self.data, self.tokenizer)
            if self.task.keys.teacher.name_or_path is not None:
                known |= known_of_teacher(spec_of_teacher(self.section), job.layout, job.seed)
            return known

        known = ranks.on_first(expected)
        parts = column.parts_of(self.data)
        ranks.on_own(lambda: column.read(place, known, parts))
        written = ranks.on_own(lambda: columns.description(place, column.EXPECTED, column.HINT))
        teacher = f"{written['name']}, {written['precision']}"
        return replace(self, notes=(f"the teacher's likeliest tokens are in {place} ({teacher})",))


def open_student(context: RunContext) -> StudentSubject:
    """Open a language model, its tokenizer and its documents. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    section = context.section
    _check(section)
    language, task = open_fitted(context)
    return StudentSubject(
        language.spec,
        task,
        language.data,
        language.packed,
        language.check,
        tokenizer=language.tokenizer,
        form=language.form,
        section=section,
    )


def _check(section: TrainerSection) -> None:
    """Raise ConfigError for keys that do not go together."""
    keys = section.distillation
    if keys.teacher.name_or_path is None and keys.column is None:
        expected = "a teacher's folder or hub id, or trainer.distillation.column"
        raise ConfigError(Problem(KEY, "saw none", expected))
    if keys.divergence != "jensen_shannon" and keys.beta != DistillationSection().beta:
        actual = f'{keys.beta:g}, with the divergence "{keys.divergence}"'
        expected = 'the divergence "jensen_shannon"'
        raise ConfigError(Problem("trainer.distillation.beta", actual, expected))
    if section.label_smoothing and not keys.hard_weight:
        actual = f"{section.label_smoothing:g}, without a cross-entropy to smooth"
        expected = "0, or a trainer.distillation.hard_weight above 0"
        raise ConfigError(Problem("trainer.label_smoothing", actual, expected))
    if section.data.stream:
        hint = "What is known of the teacher is computed of all samples before the first step."
        raise ConfigError(Problem("trainer.data.stream", "true", "false", hint))
