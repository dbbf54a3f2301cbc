"""The certificate of a language model: its tiny copy, on made-up documents."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.certify.case import MakeReference
from trainer.certify.one_process.edges import Edge, edges_of, note_of
from trainer.certify.one_process.factors import MULTIPLE
from trainer.certify.one_process.options import Amend, Option, options_of, without_rates
from trainer.certify.one_process.saved_copy import SavedCopy
from trainer.certify.recording import Sources
from trainer.certify.tiny_run import LONGEST, Tiny
from trainer.config import TrainerSection
from trainer.data.dataset import Pairs
from trainer.data.text.arrangement import arranged
from trainer.data.text.cutting import Cut, write_part
from trainer.data.text.token_files import Encoded, PreparedSource
from trainer.engines import Machine
from trainer.errors import ConfigError, Problem
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.models.pretrained.named_base import untie
from trainer.models.spec import ModelSpec
from trainer.models.tiny_config import SIZES, Sizes
from trainer.parallel.checks import packing_refusal
from trainer.probes.probe import own_randomness, tiny
from trainer.probes.questions.randomness import observe_draws
from trainer.recipe import Subject
from trainer.recipes.causal_lm.base_files import compare_base
from trainer.recipes.causal_lm.reference import Documents, LanguageReference, PackedReference
from trainer.recipes.causal_lm.task import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NO_SAMPLES = Pairs((), None, "")
LONGEST_ROW = 4096
LOGITS = 1 << 25
PARAMETERS = 24_000_000
"""The most tokens of a sample, entries of its logits, and parameters: seconds of a CPU."""
FEW = 97
"""The tokens among which half are drawn: a frequent token gets gradients from many places."""
ONE_BY_ONE = (
    "packed samples, whose documents one process runs one by one; no dropout or noise, as it "
    "would draw other values"
)


class LanguageCase:
    """The tiny copy of the config's language model, and its documents."""

    def __init__(self, small: Tiny, machine: Machine, folder: Path) -> None:
        """Make the copy, and in `folder` its weights if a run would read them. Collective."""
        architecture = model_config.read_config(small.config.trainer.model)
        named = small.config.trainer.model
        adapter = small.config.trainer.adapter
        quantize = None if adapter is None else adapter.quantize
        files = machine.ranks.await_first(lambda: compare_base(architecture, named, quantize))
        if files.untied:
            untie(architecture)
        self.base = files.finding
        small = small.noting(*files.notes)
        small = self._arranged(small, architecture, machine)
        if small.packed:
            architecture, section = without_dropout(architecture, small.config.trainer)
            small = replace(small, config=replace(small.config, trainer=section)).noting(ONE_BY_ONE)
        self._machine = machine
        self._folder = folder
        self._section = small.config.trainer
        ranks = machine.ranks
        self.architecture = architecture
        small, size = with_copy(small, self._plain(architecture))
        base = folder / "base"
        self._copy = SavedCopy(self._plain, architecture, size, small, base, ranks)
        spec = self._copy.changed(small, ranks)
        lacking = (f"the tiny copy lacks {what}: it proves less" for what in spec.tiny.lacks)
        copy = self._copy.spec
        config = copy.build().config
        heads = copy.language.attention.heads
        self.edges: Sequence[Edge] = edges_of(small, config, heads, size[2].positions - 1)
        self.small = small.noting(*lacking, *note_of(self.edges, small.packed))
        self.subject = self._subject(spec)

    def _arranged(self, small: Tiny, architecture: PreTrainedConfig, machine: Machine) -> Tiny:
        """Decide on the arrangement of documents. Collective."""
        return with_arrangement(small, architecture, machine)

    def _subject(self, spec: ModelSpec) -> Subject:
        """Return the subject of the tiny copy; `rehearse` has the documents."""
        task = CausalLM.of(spec)
        task = task.packing() if self.small.packed else task
        return Subject(spec, task, NO_SAMPLES, packed=self.small.packed)

    def _plain(self, architecture: PreTrainedConfig) -> ModelSpec:
        """Return the spec of the model itself, without weights."""
        options = self._section.model.model_copy(update={"name_or_path": None})
        return huggingface.spec_of(architecture, options)

    def options(self, small: Tiny) -> Sequence[Option]:
        return options_of(small, self.architecture)

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Write the documents, and return them with the one process that trains on them.

        Collective. Raises ConfigError if a model on packed documents draws random numbers.
        """
        small = self.small
        folder = self._folder

        def write_documents() -> Documents:
            if small.packed:
                _check_nothing_drawn(spec)
            drawn = documents_of(small, spec.language.vocabulary)
            model = self._reference(small, spec=spec, documents=drawn)
            documents = drawn._replace(held_out=model.continued(drawn.held_out))
            for name, part in documents._asdict().items():
                write_part(folder / name, part, Cut(small.row, "pack" if small.packed else "pad"))
            return documents

        documents = self._machine.ranks.on_first(write_documents)
        sources = Sources(PreparedSource(folder / "training"), PreparedSource(folder / "held_out"))
        return sources, partial(self._reference, spec=spec, documents=documents)

    def _reference(
        self, small: Tiny, amend: Amend | None = None, *, spec: ModelSpec, documents: Documents
    ) -> LanguageReference:
        """Build the one process; `amend` changes the model's config."""
        kind = PackedReference if small.packed else LanguageReference
        own = self._copy.learner(small, amend)
        return kind(small, spec, own, documents, self._machine.device)


def with_arrangement(small: Tiny, architecture: PreTrainedConfig, machine: Machine) -> Tiny:
    """Decide on `trainer.data.documents` as a run does, where the data can be read. Collective."""
    section = small.config.trainer

    def refusal() -> str:
        attention = section.model.attention
        unnamed = section.model.model_copy(update={"name_or_path": None})
        spec = huggingface.spec_of(deepcopy(architecture), unnamed)
        return packing_refusal(spec, CausalLM.of(spec), small.layout, machine.ranks, attention)

    if section.data.documents is not None:
        return small
    form = arranged(section.data, refusal, machine.ranks)
    data = section.data.model_copy(update={"documents": form.documents})
    changed = replace(small.config, trainer=section.model_copy(update={"data": data}))
    reason = (f"trainer.data.documents is {form.documents}: {form.reason}",) if form.reason else ()
    return replace(small, config=changed).noting(*reason)


def without_dropout(
    architecture: PreTrainedConfig, section: TrainerSection
) -> tuple[PreTrainedConfig, TrainerSection]:
    """Set every dropout rate of a model's config (in place) and its adapter to 0, and noise off."""
    without_rates(architecture)
    adapter = section.adapter and section.adapter.model_copy(update={"dropout": 0.0})
    return architecture, section.model_copy(update={"adapter": adapter, "neftune_alpha": 0.0})


def _check_nothing_drawn(spec: ModelSpec) -> None:
    """Raise ConfigError if the model draws random numbers."""
    with own_randomness():
        copy, model = tiny(spec)
        draws = observe_draws(model, copy).any
    if draws:
        actual = "a model that draws random numbers: others for documents that run one by one"
        expected = 'a rate of 0, or "pad", to verify it'
        raise ConfigError(Problem("trainer.data.documents", actual, expected))


def with_copy(small: Tiny, plain: ModelSpec) -> tuple[Tiny, tuple[int, int, Sizes]]:
    """Choose the size of the model's tiny copy, and a sample as long as the run's, if it can be
    computed."""
    layers = max(2, small.layout.stages + 1)  # a block more than stages
    split = small.layout.tensor * small.layout.context
    assert plain.tiny.copy is not None
    known = plain.language.vocabulary
    few = SIZES.vocabulary
    least, twice = (plain.tiny.copy(layers, split, Sizes(ids)).parameters for ids in (few, 2 * few))
    vocabulary = min(known, few + max(0, PARAMETERS - least) * few // max(1, twice - least))
    if small.layout.float8_head and vocabulary < known:
        vocabulary -= vocabulary % MULTIPLE
    wanted: int = small.config.trainer.data.sequence_length
    most = min(plain.language.positions or wanted, LONGEST_ROW, LOGITS // vocabulary)
    row = max(LONGEST, min(wanted, LONGEST if small.packed else most))
    note = f"a sequence of {row:,} tokens, the others of at most {LONGEST}"
    note += f"; ids up to {vocabulary - 1:,}"
    if vocabulary < known:
        note += f" (the model has {known:,}: it proves less of them)"
    longest = max(row, min(wanted, most)) if small.packed else row
    if longest < wanted:
        note += f" (the run's sequences have {wanted:,}: it proves less of them)"
    # one more: RoBERTa's kin count from 1
    sizes = Sizes(vocabulary, max(SIZES.positions, longest + 1))
    return replace(small, row=row).noting(note), (layers, split, sizes)


def documents_of(small: Tiny, vocabulary: int, seed: int = 0) -> Documents:
    """Draw one and a half steps of documents, so that steps span the ends of epochs.

    They are the same on every rank, and use as much of the vocabulary as there is room for, with
    its last token. There are twice as many if they are to be packed: fewer than two on average fit
    in a sample.
    """
    rng = np.random.default_rng(seed)

    def draw(count: int, longest: int) -> list[Encoded]:
        lengths = rng.integers(4, LONGEST + 6, 2 * count if small.packed else count)
        lengths[1] = longest
        total = int(lengths.sum())
        every = np.resize(np.append(vocabulary - 1, 1 + rng.permutation(vocabulary - 2)), total)
        frequent = rng.random(total) < 0.5
        tokens = np.where(frequent, rng.integers(1, min(FEW, vocabulary), total), every)
        tokens[lengths[0] + 1] = vocabulary - 1
        documents = []
        for i, own in enumerate(np.split(tokens, np.cumsum(lengths)[:-1])):
            # a third of them has a single target
            first = min(len(own), small.row + 1) - 1 if i % 3 == 0 else 1 + i % 2
            documents.append(Encoded.from_token(own.tolist(), first))
        return documents

    training = draw(small.layout.train_batch * 3 // 2 + 1, small.row + 6)
    return Documents(training, draw(small.held_out + 1, LONGEST + 6))
