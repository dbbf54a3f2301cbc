"""The certificate of a model with a head for labels: its tiny copy, on made-up samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.certify.case import MakeReference
from trainer.certify.finding import CheckResult
from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.options import Amend, Option, options_of
from trainer.certify.one_process.saved_copy import SavedCopy
from trainer.certify.recording import Sources
from trainer.certify.tiny_run import LONGEST, Tiny
from trainer.config import TrainerSection
from trainer.data.dataset import Pairs
from trainer.engines import Machine
from trainer.errors import ConfigError, DataError, Problem
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.recipe import Subject
from trainer.recipes.labels.kinds import LabelKind
from trainer.recipes.labels.model import (
    labelled_config,
    made_up,
    spec_of,
    task_of,
    with_trained_head,
)
from trainer.recipes.labels.reference import LabelsReference
from trainer.recipes.labels.rows import kind_in
from trainer.recipes.labels.subject import kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CLASSES = 5
"""The classes where the config names none, and where a label is several numbers."""


class LabelsCase:
    """The tiny copy of the config's model, and its samples."""

    base: CheckResult | None = None
    edges: Sequence[Edge] = ()

    def __init__(self, small: Tiny, machine: Machine, folder: Path) -> None:
        """Make the copy, and in `folder` its weights if a run would read them. Collective."""
        section = small.config.trainer
        ranks = machine.ranks
        if small.layout.float8 == "tensorwise":
            expected = "rowwise, to verify it"
            raise ConfigError(Problem("trainer.float8", "tensorwise, of labels", expected))
        self._machine = machine
        self._section = section
        self.kind, note = ranks.on_first(lambda: certified_kind(section))
        self._architecture = model_config.read_config(section.model)
        labelled_config(self._architecture, self.kind, section.labels.names, 0)
        section = with_trained_head(section, self._plain(self._architecture))
        small = replace(small, config=replace(small.config, trainer=section))
        size = max(2, small.layout.stages + 1), small.layout.tensor * small.layout.context
        base = folder / "base"
        self._copy = SavedCopy(self._plain, self._architecture, size, small, base, ranks)
        spec = self._copy.changed(small, ranks)
        lacking = (f"the tiny copy lacks {what}: it proves less" for what in spec.tiny.lacks)
        lengths = f"sequences of at most {LONGEST} tokens"
        self.small = small.noting(*lacking, note, lengths)
        task = task_of(spec, self.kind)
        self.subject = Subject(spec, task, Pairs((), None, ""))

    def _plain(self, architecture: PreTrainedConfig) -> ModelSpec:
        """Return the spec of the model itself, without weights."""
        options = self._section.model.model_copy(update={"name_or_path": None})
        return spec_of(architecture, options, self.kind)

    def options(self, small: Tiny) -> Sequence[Option]:
        return options_of(small, self._architecture)

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Return one and a half steps of samples, and the one process that trains on them."""
        small = self.small
        count = small.layout.train_batch * 3 // 2 + 1
        lengths = lengths_of(count + small.held_out + 1)
        every = made_up(self.kind, lengths, spec.language.vocabulary)
        sources = Sources(every[:count], every[count:])
        return sources, partial(self._reference, spec=spec, data=sources)

    def _reference(
        self, small: Tiny, amend: Amend | None = None, *, spec: ModelSpec, data: Sources
    ) -> LabelsReference:
        """Build the one process; `amend` changes the model's config."""
        own = self._copy.learner(small, amend)
        return LabelsReference(small, spec, own, data, self.kind, self._machine.device)


def labels_case(small: Tiny, machine: Machine, folder: Path) -> LabelsCase:
    return LabelsCase(small, machine, folder)


def certified_kind(section: TrainerSection) -> tuple[LabelKind, str]:
    """Return the kind of labels, of a few classes, and a note on how it is known.

    The data is looked at if the config does not name the kind; without it, a label is one class.
    """
    name = section.labels.kind
    how = "as trainer.labels.kind says"
    if name == "auto":
        name = "single"
        how = "as the data could not be looked at"
        with suppress(DataError, ConfigError):
            name = kind_in(section.data, section.labels)
            how = "as the data shows"
    count = len(section.labels.names) or (1 if name in ("regression", "reward") else CLASSES)
    return kind_of(name, count, section, []), f"labels of the kind {name}, {how}; made-up samples"


def lengths_of(count: int) -> list[int]:
    """Draw lengths of sequences, the first as long as any."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST + 1, count)
    lengths[0] = LONGEST
    return [int(length) for length in lengths]
