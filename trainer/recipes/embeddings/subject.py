"""The subject of embeddings: a body, its tokenizer, and pairs or triplets of texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from trainer.config import TrainerSection
from trainer.data.text.tokenizer import load_any_tokenizer, named_tokenizer
from trainer.errors import ConfigError, Problem
from trainer.models.flops import flops_per_token
from trainer.models.language import model_config
from trainer.models.language.fit import check_fit
from trainer.models.language.own_vocabulary import align_new
from trainer.recipe import RunContext, Subject
from trainer.recipes.embeddings.body import (
    body_of,
    check_layout,
    check_padding,
    padding_token,
    task_of,
    tried_body,
)
from trainer.recipes.embeddings.data import TextData, TextTokens, open_texts
from trainer.recipes.embeddings.sentence_files import write_modules
from trainer.storage import Json
from trainer.supervise.process import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EmbeddingSubject(Subject):
    """A body on texts, of which the loss compares all of a step."""

    data: TextData
    section: TrainerSection | None = None
    tokenizer: PreTrainedTokenizerBase = None
    unit: ClassVar[str] = "pair"
    units: ClassVar[str] = "pairs"

    def lines(self, workers: int) -> Iterator[str]:
        assert self.section is not None
        options = self.section.embeddings
        other = ", both ways" if options.symmetric else ""
        what = f"{options.pooling} pooling, {options.similarity} times {options.scale:g}{other}"
        yield f"loss    each anchor among all texts of a step: {what}"

    def is_named(self, section: TrainerSection) -> bool:
        return section.data.path is not None

    def describe_to(self, planned: Json) -> None:
        model_config.state_vocabulary(planned["model"], self.spec.language.vocabulary)

    def flops(self, section: TrainerSection) -> float | None:
        """Return the FLOPs of a pair: of all its texts' tokens, the mean over the data."""
        summary = self.data.train.summary
        tokens = summary.tokens / summary.samples
        length = max(1, round(tokens / summary.columns))
        return flops_per_token(self.spec, length) * tokens

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        super().save(folder, dtype)
        assert self.section is not None
        length = self.section.data.sequence_length
        self.tokenizer.save_pretrained(folder)
        width = self.spec.language.hidden_size or 0
        write_modules(folder, self.section.embeddings, width, length)


def open_embeddings(context: RunContext) -> EmbeddingSubject:
    """Open a body, its tokenizer and its texts. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    section = context.section
    ranks = context.ranks
    handed = context.handed_in
    if handed.model is not None or handed.data is not None or handed.loss is not None:
        expected = "what the config names: a model, texts, and the loss of the task"
        raise ConfigError(Problem("train", "what a script hands in", expected))
    if section.data.path is None:
        expected = "files with the columns anchor and positive"
        raise ConfigError(Problem("trainer.data.path", "nothing", expected))
    check_layout(context.layout)
    architecture = ranks.on_own(lambda: model_config.read_config(section.model))
    tokenizer = open_tokenizer(context)
    notes = ranks.on_own(lambda: align_new(section.model, architecture, tokenizer))
    options = section.embeddings
    prompts = options.prompts.get("query", ""), options.prompts.get("document", "")
    work = TextTokens(tokenizer, section.data.sequence_length, *prompts)
    spec = body_of(architecture, section)
    task = task_of(section, spec, work)
    data = open_texts(section.data, options, work, cache_folder(), ranks, context.progress)
    check_fit(spec, data.largest_token_id, section.data.sequence_length)
    spec = tried_body(replace(spec, notes=(*spec.notes, *notes)), task)
    ranks.try_on_first(lambda: check_padding(spec, task))
    return EmbeddingSubject(spec, task, data, False, data.check, section, tokenizer)


def open_tokenizer(context: RunContext) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the config names, or train the embedded one. Collective."""
    section = context.section
    tokenizer = named_tokenizer(
        section,
        load_any_tokenizer,
        context.ranks,
        context.progress,
        padding_side="right",
        model_max_length=section.data.sequence_length,
    )
    context.ranks.try_on_first(lambda: padding_token(tokenizer))
    padding_token(tokenizer)
    return tokenizer
