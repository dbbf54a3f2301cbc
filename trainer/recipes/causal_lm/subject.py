"""The subject of a causal language model: its model, tokenizer and documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from trainer.config import Config
from trainer.config.sections.trainer import TrainerSection
from trainer.data.mixture import Source
from trainer.data.stream import Place, Stream
from trainer.data.text.arrangement import Arranged, arranged
from trainer.data.text.chats.chat import Template
from trainer.data.text.preparation import open_data
from trainer.data.text.prepared import Data
from trainer.data.text.preview import preview
from trainer.data.text.tokenizer import load_tokenizer, named_tokenizer
from trainer.engines import Metrics
from trainer.layout import Layout
from trainer.models import huggingface
from trainer.models.flops import flops_per_token
from trainer.models.language import model_config
from trainer.models.language.fit import check_fit
from trainer.models.language.own_vocabulary import align_new
from trainer.models.spec import ModelSpec
from trainer.parallel.checks import packing_refusal
from trainer.parallel.parallel_mesh import division_of
from trainer.recipe import RunContext, Subject
from trainer.recipes.causal_lm.continuation import beginning, continuation
from trainer.recipes.causal_lm.task import CausalLM
from trainer.storage import Json
from trainer.supervise.process import cache_folder
from trainer.tasks.harness import check_tasks
from trainer.tasks.kernel_probes import notes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LanguageSubject(Subject):
    """A causal language model on documents."""

    task: CausalLM
    data: Data
    tokenizer: PreTrainedTokenizerBase = None
    form: Arranged = Arranged("concatenate")
    """The arrangement of documents in samples."""
    unit: ClassVar[str] = "tok"
    units: ClassVar[str] = "tokens"

    def settled(self, config: Config) -> Config:
        data = config.trainer.data.model_copy(update={"documents": self.form.documents})
        origins = dict(config.origins)
        if self.form.reason:
            origins["trainer.data.documents"] = f"auto: {self.form.reason}"
        trainer = config.trainer.model_copy(update={"data": data})
        return replace(config, trainer=trainer, origins=origins)

    def trained(self, spec: ModelSpec, section: TrainerSection) -> Subject:
        task = self.task.regularised(spec, section.label_smoothing, section.neftune_alpha)
        watched = task.watching(len(section.data.sources)) if section.log.by_source else task
        return replace(self, spec=spec, task=watched)

    def reading(self, place: Sequence[object]) -> AbstractContextManager[object]:
        if not isinstance(stream := self.data.train, Stream):
            return nullcontext()
        stream.begin(Place(*place))  # type: ignore[arg-type]  # of JSON
        return closing(stream)

    def lines(self, workers: int) -> Iterator[str]:
        yield from (f"source  {line}" for line in self.data.lines())

    def kernels(self, layout: Layout, device: torch.device) -> Iterator[str]:
        model = self.task.attention()
        dtype = getattr(torch, layout.precision)
        divided = division_of(layout, self.spec.language.attention.heads).groups > 1
        return notes(model, self.spec, self.packed, dtype, device, divided)

    def amount(self, samples: int, section: TrainerSection) -> str:
        tokens = samples * section.data.sequence_length
        flops = self.flops(section) or 0.0
        amount = f"{tokens / 1e6:,.1f} M" if tokens >= 1e5 else f"{tokens:,}"
        return f", at most {amount} tokens, {flops / 1e6:,.0f} MFLOP a token"

    def flops(self, section: TrainerSection) -> float | None:
        return flops_per_token(self.spec, section.data.sequence_length)

    def samples(self, numbers: list[int], width: int = 100, in_full: bool = False) -> str:
        return preview(self.data.train, self.tokenizer, numbers, width, in_full)

    def is_named(self, section: TrainerSection) -> bool:
        return True

    def describe_to(self, planned: Json) -> None:
        model_config.state_vocabulary(planned["model"], self.spec.language.vocabulary)

    def measures(self, loss: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(loss, 700.0))}

    def losses_by_source(self, metrics: Metrics, device: torch.device) -> dict[str, float] | None:
        if (by_source := self.task.by_source) is None:
            return None
        losses, targets = by_source.take(metrics.group, device).tolist()
        losses_of = zip(self.data.shares, losses, targets, strict=True)
        return {share.label: loss / count for share, loss, count in losses_of if count}

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        super().save(folder, dtype)
        self.tokenizer.save_pretrained(folder)
        base = self.spec.files.base
        if base is not None and self.tokenizer.name_or_path == self.spec.name:
            base.save_tokenizer_files(folder)

    def prompts(self) -> Source:
        """Return the documents with whose beginning an example begins."""
        return next(iter(self.data.evaluations.values()), self.data.train)

    def example(self, folder: Path, section: TrainerSection) -> str | None:
        wanted = section.generate
        if wanted.prompt is None:
            return None
        source = self.prompts()
        room = section.data.sequence_length - wanted.tokens
        prompt = beginning(source, room) if wanted.prompt == "auto" else wanted.prompt
        trust = section.model.trust_remote_code
        return continuation(folder, self.tokenizer, prompt, wanted.tokens, trust)


class LanguageParts(NamedTuple):
    """A language model, without its data."""

    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase
    notes: tuple[str, ...]
    """Lines for the user."""


def language_parts(context: RunContext) -> LanguageParts:
    """Open a language model and its tokenizer. Raises ConfigError. Collective."""
    section = context.section
    ranks = context.ranks
    if section.evaluation.tasks:
        ranks.await_first(lambda: check_tasks(section.evaluation.tasks))
    architecture = ranks.on_own(lambda: model_config.read_config(section.model))
    tokenizer = _tokenizer(context)
    notes = ranks.on_own(lambda: align_new(section.model, architecture, tokenizer))
    spec = context.changed(huggingface.spec_of(architecture, section.model))
    rotary = _longrope_notes(section.data.sequence_length, architecture)
    return LanguageParts(spec, tokenizer, (*notes, *rotary))


def fitted(context: RunContext, parts: LanguageParts, data: Data) -> LanguageParts:
    """Return the model with the template of its chats, and notes on them. Collective.

    Raises ConfigError or DataError if it has no id for a token, or too few positions.
    """
    section = context.section
    tokenizer = parts.tokenizer
    if data.has_chats:  # saved with the trained model, so that it is prompted as it was trained
        template = Template.of(tokenizer, section.data.chat_template)
        if template.text:
            tokenizer = _tokenizer(context, chat_template=template.text)
    notes = [*parts.notes, *data.unrendered()]
    if section.data.chat_template is not None and not data.has_chats:
        notes.append("trainer.data.chat_template has no effect: the data has no chats")
    check_fit(parts.spec, data.largest_token_id, section.data.sequence_length)
    return parts._replace(tokenizer=tokenizer, notes=tuple(notes))


def open_language_model(context: RunContext) -> LanguageSubject:
    """Open a language model, its tokenizer and its documents. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    section = context.section
    ranks = context.ranks
    parts = language_parts(context)
    spec = parts.spec
    task = CausalLM.of(spec, parts.tokenizer.pad_token_id or 0)

    def refusal() -> str:
        return packing_refusal(spec, task, context.layout, ranks, section.model.attention)

    form = arranged(section.data, refusal, ranks)
    settled = section.data.model_copy(update={"documents": form.documents})
    task = task.packing() if settled.packs else task
    source = (cache_folder(), ranks, context.sample_order, context.progress)
    data = open_data(settled, parts.tokenizer, *source)
    _, tokenizer, notes = fitted(context, parts, data)
    if form.reason and form.documents == "pad":
        notes = (*notes, f"trainer.data.documents is pad: {form.reason}")
    spec = replace(spec, notes=(*spec.notes, *notes))
    return LanguageSubject(spec, task, data, settled.packs, data.check, tokenizer, form)


def _tokenizer(context: RunContext, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the config names, or train the embedded one. Collective.

    With `chat_template`, it is saved with that one in place of its own.
    """
    options: Json = {} if chat_template is None else {"chat_template": chat_template}
    return named_tokenizer(
        context.section, load_tokenizer, context.ranks, context.progress, **options
    )


def _longrope_notes(sequence: int, architecture: PreTrainedConfig) -> tuple[str, ...]:
    """Warn if rotary embeddings depend on the longest row, which a tiny copy lacks."""
    rope = getattr(architecture.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    long = (kind for kind in kinds if kind.get("rope_type") == "longrope")
    limits = [kind.get("original_max_position_embeddings") for kind in long]
    reached = [limit for limit in limits if limit and sequence > limit]
    if not reached:
        return ()
    change = f"change in a micro-batch that has a sequence of more than {reached[0]} tokens"
    so = "its loss depends on which samples share a micro-batch"
    return (f"its rotary embeddings (longrope) {change}: {so}",)
