"""The certificate of embeddings: a tiny copy of the body, on made-up texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from trainer.data.dataset import Pairs
from trainer.engines import Machine
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.recipe import Subject
from trainer.recipes.embeddings.body import body_of, check_layout, tried_body
from trainer.recipes.embeddings.data import TextSample
from trainer.recipes.embeddings.reference import EmbeddingReference
from trainer.recipes.embeddings.task import EmbeddingTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SKIPPED = (2, 1)
"""The tokens of prompts that are not pooled, if the config pools none of them."""
COLUMNS = 3
"""The texts of a sample where the config does not say: anchor, positive and a negative."""


class EmbeddingsCase:
    """The tiny copy of the config's body, and its texts."""

    base: CheckResult | None = None
    edges: Sequence[Edge] = ()

    def __init__(self, small: Tiny, machine: Machine, folder: Path) -> None:
        """Make the copy, and in `folder` its weights if a run would read them. Collective."""
        check_layout(small.layout)
        section = small.config.trainer
        options = section.embeddings
        self._machine = machine
        self._section = section
        self.architecture = model_config.read_config(section.model)
        size = max(2, small.layout.stages + 1), small.layout.tensor
        base = folder / "base"
        self._copy = SavedCopy(self._plain, self.architecture, size, small, base, machine.ranks)
        spec = self._copy.changed(small, machine.ranks)
        self.skipped = (0, 0) if options.include_prompt else SKIPPED
        task = EmbeddingTask.of(options, 0, self.skipped, spec.language.hidden_size or 0)
        self.columns = max(len(options.columns), 2 + (options.negatives or COLUMNS - 2))
        lacking = (f"the tiny copy lacks {what}: it proves less" for what in spec.tiny.lacks)
        note = f"samples of {self.columns} texts of at most {LONGEST} tokens"
        self.small = small.noting(*lacking, note)
        self.subject = Subject(tried_body(spec, task), task, Pairs((), None, ""))

    def _plain(self, architecture: PreTrainedConfig) -> ModelSpec:
        """Return the spec of the body itself, without weights."""
        unnamed = self._section.model.model_copy(update={"name_or_path": None})
        section = self._section.model_copy(update={"model": unnamed})
        return body_of(architecture, section)

    def options(self, small: Tiny) -> Sequence[Option]:
        return [*options_of(small, self.architecture), *_of_the_task(small)]

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Return the texts, and the one process that trains on them."""
        small = self.small
        count = small.layout.train_batch * 3 // 2 + 1
        every = made_up(count + small.held_out + 1, self.columns, spec.language.vocabulary)
        sources = Sources(every[:count], every[count:])
        return sources, partial(self._reference, spec=spec, sources=sources)

    def _reference(
        self, small: Tiny, amend: Amend | None = None, *, spec: ModelSpec, sources: Sources
    ) -> EmbeddingReference:
        """Build the one process; `amend` changes the model's config."""
        own = self._copy.learner(small, amend)
        device = self._machine.device
        return EmbeddingReference(small, spec, own, sources, self.skipped, device)


def _of_the_task(small: Tiny) -> Iterator[Option]:
    """Yield the options of the loss that are on, each without it."""
    section = small.config.trainer
    for key, off in (("symmetric", False), ("normalize", False)):
        if getattr(section.embeddings, key):
            options = section.embeddings.model_copy(update={key: off})
            changed = section.model_copy(update={"embeddings": options})
            config = replace(small.config, trainer=changed)
            yield Option(f"embeddings.{key}", replace(small, config=config))


def made_up(count: int, columns: int, vocabulary: int) -> list[TextSample]:
    """Draw samples of ragged texts, some of which are equal; the same on every rank.

    Each positive is a changed anchor. Of four samples, one has the positive of the one before, and
    one its anchor. A negative may be another sample's positive.
    """
    rng = np.random.default_rng(0)
    texts = list[np.ndarray]()
    rows = list[list[int]]()

    def drawn() -> int:
        length = int(rng.integers(1, LONGEST + 1))
        texts.append(1 + rng.integers(vocabulary - 1, size=length).astype(np.int32))
        return len(texts) - 1

    def changed(text: int) -> int:
        positive = texts[text].copy()
        positive[-1] = 1 + positive[-1] % (vocabulary - 1)
        texts.append(positive)
        return len(texts) - 1

    for number in range(count):
        anchor = drawn()
        row = [anchor, changed(anchor), *(drawn() for _ in range(columns - 2))]
        if number % 4 == 1:
            row[1] = rows[-1][1]
        elif number % 4 == 3:
            row[0] = rows[-1][0]
        elif number % 4 == 2 and columns > 2:
            row[2] = rows[-1][1]
        rows.append(row)
    return [
        {"tokens": [texts[one] for one in row], "texts": np.array(row), "real": True}
        for row in rows
    ]
