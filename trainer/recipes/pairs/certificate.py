"""The certificate of preference optimisation: the tiny copy of a language model, on made-up pairs.

The reference is what the run's own layout computes before the first step, with a number added to
each, so that no margin is 0; one process computes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from trainer.certify.case import MakeReference
from trainer.certify.one_process.options import Amend, Option
from trainer.certify.recording import Sources
from trainer.certify.tiny_run import Tiny
from trainer.data.text.cutting import Cut, CutDocuments, PartWriter
from trainer.data.text.token_files import Encoded, EncodedPair, Origin, PreparedPairs
from trainer.engines import Engine, Machine
from trainer.models.spec import ModelSpec
from trainer.recipe import Subject
from trainer.recipes.causal_lm.certificate import NO_SAMPLES, LanguageCase, documents_of
from trainer.recipes.causal_lm.task import CausalLM
from trainer.recipes.pairs import reference
from trainer.recipes.pairs.losses import LOSSES
from trainer.recipes.pairs.one_process import Drawn, PreferenceReference
from trainer.recipes.pairs.task import PairsTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class CertifiedPairs(Subject):
    """A tiny copy, whose made-up pairs get their reference from the run's own layout."""

    task: PairsTask
    parts: dict[str, tuple[PreparedPairs, Drawn]] = field(default_factory=dict, kw_only=True)
    """The pairs, with what they were made of: filled by the case's `rehearse`."""
    counts_tokens: ClassVar[bool] = False

    @property
    def probed(self) -> CausalLM:
        return CausalLM.of(self.spec)

    def before_training(self, engine: Engine, folder: Path, step: int) -> Subject:
        has_reference = LOSSES[self.task.keys.loss].has_reference
        for part, drawn in self.parts.values() if has_reference else ():
            numbers = np.arange(len(part))
            known = reference.log_probabilities(engine, self.task, part, numbers)
            part.refer_to(known + drawn.shifts[: len(known)])
        return self


class PreferenceCase(LanguageCase):
    """The tiny copy of the config's language model, and its pairs."""

    def _arranged(self, small: Tiny, architecture: PreTrainedConfig, machine: Machine) -> Tiny:
        data = small.config.trainer.data.model_copy(update={"documents": "pad"})
        trainer = small.config.trainer.model_copy(update={"data": data})
        return replace(small, config=replace(small.config, trainer=trainer))

    def _subject(self, spec: ModelSpec) -> Subject:
        task = PairsTask.of(spec)
        assert isinstance(task, PairsTask)
        return CertifiedPairs(spec, task.comparing(self._section.pairs), NO_SAMPLES)

    def options(self, small: Tiny) -> Sequence[Option]:
        section = small.config.trainer
        options = list(super().options(small))
        keys = section.pairs
        kind = LOSSES[keys.loss]
        off = {"label_smoothing": 0.0} if keys.label_smoothing and not kind.needs_smoothing else {}
        weight = kind.sft_weight if keys.sft_weight is None else keys.sft_weight
        off |= {"sft_weight": 0.0} if weight else {}
        for key, value in off.items():
            pairs = keys.model_copy(update={key: value})
            config = replace(small.config, trainer=section.model_copy(update={"pairs": pairs}))
            options.append(Option(f"pairs.{key}", replace(small, config=config)))
        return options

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Write the pairs, and return them with the one process that trains on them. Collective."""
        small = self.small
        subject = self.subject
        assert isinstance(subject, CertifiedPairs)
        vocabulary = spec.language.vocabulary
        chosen = documents_of(small, vocabulary)
        rejected = documents_of(small, vocabulary, seed=1)
        keys = self._section.pairs
        drawn = [
            _drawn(number, both, keys.beta, LOSSES[keys.loss].takes_margins)
            for number, both in enumerate(zip(chosen, rejected, strict=True))
        ]
        names = ("training", "held_out")

        def write() -> None:
            for name, part in zip(names, drawn, strict=True):
                _write(self._folder / name, part, Cut(small.row, "pairs"))

        self._machine.ranks.on_first(write)
        parts = [PreparedPairs(self._folder / name) for name in names]
        subject.parts.update(zip(names, zip(parts, drawn, strict=True), strict=True))
        make = partial(self._compared, spec=spec, drawn=drawn)
        return Sources(*parts), make

    def _compared(
        self,
        small: Tiny,
        amend: Amend | None = None,
        *,
        spec: ModelSpec,
        drawn: Sequence[Drawn],
    ) -> PreferenceReference:
        """Build the one process; `amend` changes the model's config."""
        own = self._copy.learner(small, amend)
        device = self._machine.device
        return PreferenceReference(small, spec, own, drawn, device)


def _drawn(
    number: int, both: tuple[list[Encoded], list[Encoded]], beta: float, margins: bool
) -> Drawn:
    """Draw what is added to the reference of each pair, and its margin, if the loss takes one."""
    rng = np.random.default_rng([3, number])
    chosen, rejected = both
    count = len(chosen)
    shifts = rng.normal(size=(count, 2)) / beta
    own = rng.normal(size=count) / beta if margins else np.zeros(count)
    return Drawn(chosen, rejected, shifts, own)


def _write(folder: Path, drawn: Drawn, cut: Cut) -> None:
    some = CutDocuments()
    for chosen, rejected, margin in zip(
        drawn.chosen, drawn.rejected, drawn.margins.tolist(), strict=True
    ):
        some.add_pair(EncodedPair(chosen, rejected, margin), cut)
    writer = PartWriter(folder)
    writer.append(some)
    writer.finish(cut, Origin())
