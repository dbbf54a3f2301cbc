"""The certificate of a masked language model: its tiny copy, on made-up samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.certify.case import MakeReference
from trainer.certify.finding import CheckResult
from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.options import Amend, Option, options_of
from trainer.certify.one_process.saved_copy import SavedCopy
from trainer.certify.recording import Sources
from trainer.certify.tiny_run import LONGEST, Tiny
from trainer.data.dataset import Pairs
from trainer.engines import Machine
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.recipe import Subject
from trainer.recipes.labels.certificate import lengths_of
from trainer.recipes.masked_lm.masking import Masked
from trainer.recipes.masked_lm.model import check_layout, made_up_rule, made_up_tokens, spec_of
from trainer.recipes.masked_lm.reference import MaskedReference
from trainer.recipes.masked_lm.task import MaskedTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class MaskedCase:
    """The tiny copy of the config's model, and its samples, masked by the config's rule."""

    base: CheckResult | None = None
    edges: Sequence[Edge] = ()

    def __init__(self, small: Tiny, machine: Machine, folder: Path) -> None:
        """Make the copy, and in `folder` its weights if a run would read them. Collective."""
        check_layout(small.layout)
        ranks = machine.ranks
        self._machine = machine
        self._section = small.config.trainer
        self._architecture = model_config.read_config(self._section.model)
        size = max(2, small.layout.stages + 1), small.layout.tensor
        base = folder / "base"
        self._copy = SavedCopy(self._plain, self._architecture, size, small, base, ranks)
        spec = self._copy.changed(small, ranks)
        lacking = (f"the tiny copy lacks {what}: it proves less" for what in spec.tiny.lacks)
        self.small = small.noting(*lacking, f"sequences of at most {LONGEST} random tokens")
        self.subject = Subject(spec, MaskedTask(spec, 0), Pairs((), None, ""))

    def _plain(self, architecture: PreTrainedConfig) -> ModelSpec:
        """Return the spec of the model itself, without weights."""
        return spec_of(architecture, self._section.model.model_copy(update={"name_or_path": None}))

    def options(self, small: Tiny) -> Sequence[Option]:
        return options_of(small, self._architecture)

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Return one and a half steps of samples, and the one process that trains on them."""
        small = self.small
        count = small.layout.train_batch * 3 // 2 + 1
        vocabulary = spec.language.vocabulary
        tokens = made_up_tokens(lengths_of(count + small.held_out + 1), vocabulary)
        plain = Sources(tokens[:count], tokens[count:])
        rule = made_up_rule(self._section.masked, vocabulary)
        seed = self._section.seed
        masked = Sources(*(Masked(part, rule, seed) for part in plain))
        return masked, partial(self._reference, spec=spec, data=masked)

    def _reference(
        self, small: Tiny, amend: Amend | None = None, *, spec: ModelSpec, data: Sources
    ) -> MaskedReference:
        """Build the one process; `amend` changes the model's config."""
        own = self._copy.learner(small, amend)
        return MaskedReference(small, spec, own, data, self._machine.device)
