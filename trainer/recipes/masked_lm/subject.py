"""The subject of a masked language model: its model, its tokenizer and its documents."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from trainer.config import Config
from trainer.config.sections.model_and_data import DataSection
from trainer.config.sections.trainer import TrainerSection
from trainer.data.mixture import Source
from trainer.data.text.preparation import open_data
from trainer.data.text.prepared import Data
from trainer.data.text.preview import preview
from trainer.data.text.tokenizer import load_any_tokenizer, named_tokenizer, tokenizer_name
from trainer.errors import ConfigError, DataError, Problem
from trainer.models.language import model_config
from trainer.models.language.fit import check_fit
from trainer.models.language.own_vocabulary import align_new
from trainer.recipe import RunContext, Subject
from trainer.recipes.labels.model import padding_of
from trainer.recipes.masked_lm.masking import Masked, MaskRule, WholeTexts
from trainer.recipes.masked_lm.model import (
    BOTH_SIDES,
    check_layout,
    check_own_loss,
    flops_of,
    spec_of,
)
from trainer.recipes.masked_lm.task import MaskedTask
from trainer.storage import Json
from trainer.supervise.process import cache_folder
from trainer.tasks.task import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL = {"mask_token": "<mask>", "pad_token": "<pad>"}
"""The tokens that the embedded tokenizer lacks."""


@dataclass(frozen=True)
class MaskedData:
    """The documents that a run trains on and is evaluated on, masked."""

    documents: Data
    rule: MaskRule
    train: Source
    evaluations: Mapping[str, Source]

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.documents.fingerprint, self.rule.key])
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        held_out = sum(map(len, self.evaluations.values()))
        shares = self.documents.shares
        what = f"{len(shares)} sources"
        if len(shares) == 1:
            summary = self.documents.summary
            what = f"{summary.describe_documents()}, {summary.tokens:,} tokens"
        samples = f"{len(self.train):,} samples, {held_out:,} held out"
        return f"{what}, {samples}, {self.rule.probability:.0%} of the tokens masked"

    def description(self) -> Json:
        unmasked = {"targets", "unigram_entropy"}
        known = self.documents.description()
        return {name: value for name, value in known.items() if name not in unmasked}


@dataclass(frozen=True)
class MaskedSubject(Subject):
    """A masked language model on documents."""

    task: MaskedTask
    data: MaskedData
    tokenizer: PreTrainedTokenizerBase = None
    unit: ClassVar[str] = "target"
    units: ClassVar[str] = "predicted tokens"

    def settled(self, config: Config) -> Config:
        if config.trainer.data.documents is not None:
            return config
        data = config.trainer.data.model_copy(update={"documents": "concatenate"})
        trainer = config.trainer.model_copy(update={"data": data})
        return replace(config, trainer=trainer)

    def is_named(self, section: TrainerSection) -> bool:
        return True

    def describe_to(self, planned: Json) -> None:
        model_config.state_vocabulary(planned["model"], self.spec.language.vocabulary)

    def flops(self, section: TrainerSection) -> float | None:
        """Return the FLOPs of a predicted token, and of the tokens that are read for it."""
        whole = flops_of(self.spec, section.masked, section.data.sequence_length)
        return whole / section.masked.probability

    def samples(self, numbers: list[int], width: int = 100, in_full: bool = False) -> str:
        return preview(_Shown(self.data.train), self.tokenizer, numbers, width, in_full)

    def measures(self, loss: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(loss, 700.0))}

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        super().save(folder, dtype)
        self.tokenizer.save_pretrained(folder)


class _Shown:
    """Masked samples as a preview takes them."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        sample = self._source[index]
        return {"input_ids": sample["input_ids"], "targets": sample["labels"]}


def open_masked(context: RunContext) -> MaskedSubject:
    """Open a masked language model, its tokenizer and its documents. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    section = context.section
    ranks = context.ranks
    _check(context)
    architecture = ranks.on_own(lambda: model_config.read_config(section.model))
    tokenizer = tokenizer_of(context)
    notes = ranks.on_own(lambda: align_new(section.model, architecture, tokenizer))
    rule = rule_of(tokenizer, section)
    data = open_documents(context, tokenizer, rule)
    padding = ranks.on_own(lambda: padding_of(architecture, tokenizer))
    spec = spec_of(architecture, section.model)
    largest = max(data.documents.largest_token_id, rule.vocabulary - 1)
    check_fit(spec, largest, section.data.sequence_length)
    ranks.on_first(lambda: check_own_loss(spec))
    spec = replace(spec, notes=(*spec.notes, *notes))
    check = data.documents.check
    return MaskedSubject(spec, MaskedTask(spec, padding), data, False, check, tokenizer)


def tokenizer_of(context: RunContext) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the config names, or train the embedded one. Collective.

    Raises DataError if it has no mask token, or none that ends texts.
    """
    section = context.section
    own = {} if tokenizer_name(section) else SPECIAL
    tokenizer = _loaded(context, own)
    if tokenizer.mask_token_id is None:
        actual = "a tokenizer without a mask token"
        hint = "Set mask_token in its tokenizer_config.json, or name another base"
        raise DataError(Problem("trainer.data.tokenizer", actual, "mask_token", hint))
    return tokenizer


def _loaded(context: RunContext, special: Mapping[str, str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with these special tokens. Collective."""
    load = load_any_tokenizer
    return named_tokenizer(context.section, load, context.ranks, context.progress, **special)


def rule_of(tokenizer: PreTrainedTokenizerBase, section: TrainerSection) -> MaskRule:
    options = section.masked
    shares = options.probability, options.masked, options.random
    ids = tokenizer.mask_token_id, len(tokenizer)
    return MaskRule(*shares, *ids, frozenset(tokenizer.all_special_ids))


def open_documents(
    context: RunContext, tokenizer: PreTrainedTokenizerBase, rule: MaskRule
) -> MaskedData:
    """Prepare the documents as those of a language model, each between its special tokens.

    Collective. Raises DataError.
    """
    section = context.section
    around = {"bos_token": tokenizer.cls_token, "eos_token": tokenizer.sep_token}
    lacking = {
        name: token
        for name, token in around.items()
        if token is not None and getattr(tokenizer, name) is None
    }
    ending = _loaded(context, lacking) if lacking else tokenizer
    settings = _of_texts(section.data)
    length = settings.sequence_length
    padded = settings.documents == "pad"
    if padded:  # the last token of a text is the target of the one before it
        settings = settings.model_copy(update={"sequence_length": length - 1})
    opening = (cache_folder(), context.ranks, context.sample_order, context.progress)
    data = open_data(settings, ending, *opening)

    def masked(source: Source) -> Source:
        end = int(ending.eos_token_id)
        whole = WholeTexts(source, length, end) if padded else source
        return Masked(whole, rule, section.seed)

    evaluations = {name: masked(source) for name, source in data.evaluations.items()}
    return MaskedData(data, rule, masked(data.train), evaluations)


def _of_texts(data: DataSection) -> DataSection:
    """Return the settings by which rows are read as texts, and as nothing else."""
    texts: Json = {"records": "text", "documents": data.documents or "concatenate"}
    sources = [source.model_copy(update={"records": "text"}) for source in data.sources]
    return data.model_copy(update=texts | {"sources": sources})


def _check(context: RunContext) -> None:
    """Raise ConfigError for what a script hands in, and for what this task does not do."""
    handed_in = context.handed_in
    for key in ("model", "data", "loss", "evaluation_data"):
        if getattr(handed_in, key) is not None:
            expected = "none: the config names what is trained"
            raise ConfigError(Problem(key, f'a {key}, with the task "masked_lm"', expected))
    section = context.section
    if section.data.documents == "pack":
        expected = f'"concatenate" or "pad": {BOTH_SIDES}'
        raise ConfigError(Problem("trainer.data.documents", "pack", expected))
    if section.log.by_source:
        actual = "saw true, and masked tokens"
        raise ConfigError(Problem("trainer.log.by_source", actual, "false for the task masked_lm"))
    if section.model.name_or_path is None and section.model.config is None:
        actual = "neither a name nor a config: the embedded default predicts next tokens"
        raise ConfigError(Problem("trainer.model", actual, "a model with a head for masked tokens"))
    check_layout(context.layout)
