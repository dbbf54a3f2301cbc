"""The subject of a model with a head for labels: its model, its tokenizer and its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from trainer.config import Config
from trainer.config.sections.adapter import AdapterSection
from trainer.config.sections.model_and_data import DataSection
from trainer.config.sections.trainer import TrainerSection
from trainer.data.text.chats.chat import Template
from trainer.data.text.preferences import RECORDS
from trainer.data.text.tokenizer import load_any_tokenizer, named_tokenizer, tokenizer_name
from trainer.errors import ConfigError, Problem
from trainer.models.finetuning.changed import changed_spec
from trainer.models.flops import flops_per_token
from trainer.models.language import model_config
from trainer.models.language.fit import check_ids
from trainer.models.language.own_vocabulary import align_new
from trainer.models.spec import ModelSpec
from trainer.recipe import RunContext, Subject
from trainer.recipes.labels.encoded import Encoder
from trainer.recipes.labels.kinds import KINDS, LabelKind, Name, Regression, Reward
from trainer.recipes.labels.model import (
    BaseClasses,
    built,
    labelled_config,
    padding_of,
    spec_of,
    task_of,
    with_trained_head,
)
from trainer.recipes.labels.own_loss import check_own_loss
from trainer.recipes.labels.rows import kind_in
from trainer.recipes.labels.samples import Known, LabelData, open_samples
from trainer.recipes.labels.task import LabelTask
from trainer.storage import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LabelSubject(Subject):
    """A model with a head for labels, on labelled texts."""

    task: LabelTask
    data: LabelData
    tokenizer: PreTrainedTokenizerBase = None
    adapter: AdapterSection | None = None
    """The config's adapter, with which the head is trained."""
    plain: ModelSpec | None = None
    """The spec without an adapter."""

    unit: ClassVar[str] = "sample"
    units: ClassVar[str] = "labels"

    def settled(self, config: Config) -> Config:
        if self.adapter is None or self.adapter == config.trainer.adapter:
            return config
        reason = {"trainer.adapter.modules_to_save": "auto: the head is trained"}
        trainer = config.trainer.model_copy(update={"adapter": self.adapter})
        return replace(config, trainer=trainer, origins={**config.origins, **reason})

    def lines(self, workers: int) -> Iterator[str]:
        if names := self.data.names:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            yield f"labels  {shown}"

    def is_named(self, section: TrainerSection) -> bool:
        return section.data.path is not None

    def figures(self, measures: Mapping[str, float]) -> dict[str, float]:
        return self.task.kind.figures(measures)

    def describe_to(self, planned: Json) -> None:
        model_config.state_vocabulary(planned["model"], self.spec.language.vocabulary)
        planned["labels"] |= {"kind": self.data.kind}
        if self.data.names:
            planned["labels"] |= {"names": list(self.data.names)}

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        super().save(folder, dtype)
        if self.adapter is not None and self.plain is not None:  # its labels, which PEFT leaves out
            self.plain.files.save_config(folder, dtype)
        self.tokenizer.save_pretrained(folder)


def open_labels(context: RunContext) -> LabelSubject:
    """Open a model with a head for labels, its tokenizer and its samples. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    section = context.section
    ranks = context.ranks
    _check(context)
    architecture = ranks.on_own(lambda: model_config.read_config(section.model))
    name = ranks.await_first(lambda: kind_in(section.data, section.labels))
    _check_records(section.data, name)
    tokenizer = tokenizer_of(context, name == "tokens")
    notes = ranks.on_own(lambda: align_new(section.model, architecture, tokenizer))
    base = BaseClasses(architecture, name == "tokens")
    template = Template.of(tokenizer, section.data.chat_template)
    room = section.data.sequence_length
    encoder = Encoder(tokenizer, template, room, section.data.too_long)
    numbers = name in ("reward", "regression")
    known = Known(name, () if numbers else section.labels.names or base.names)
    given = (encoder, known, ranks, context.progress)
    data = open_samples(section.data, section.labels, *given)
    kind = kind_of(data.kind, data.count, section, data.centre)
    padding = ranks.on_own(lambda: padding_of(architecture, tokenizer))
    if tokenizer.pad_token_id != padding:  # it is saved with the model, whose head knows it
        pads = str(tokenizer.convert_ids_to_tokens(padding))
        tokenizer = tokenizer_of(context, name == "tokens", pad_token=pads)
    new_head = base.is_classifier and bool(section.labels.names) and base.names != data.names
    ranks.on_first(lambda: _check_classes(base, kind, data, new_head, section))
    labelled_config(architecture, kind, data.names, padding)
    plain = spec_of(architecture, section.model, kind, new_head=new_head)
    adapted = with_trained_head(section, plain)
    spec = changed_spec(plain, adapted, ranks)
    _check_fit(spec, data)
    ranks.on_first(lambda: check_own_loss(spec, kind))
    task = task_of(spec, kind).measuring()
    spec = replace(spec, notes=(*spec.notes, *notes, *_notes(kind, tokenizer, padding)))
    more = {"tokenizer": tokenizer, "adapter": adapted.adapter, "plain": plain}
    return LabelSubject(spec, task, data, check=data.check, **more)


def kind_of(name: str, count: int, section: TrainerSection, centre: list[float]) -> LabelKind:
    """Return the kind of labels of this name, of so many classes or numbers."""
    if name == "reward":
        return Reward(1, section.labels.centring)
    if section.labels.centring:
        actual = f"saw {section.labels.centring:g}, and labels of the kind {name}"
        raise ConfigError(Problem("trainer.labels.centring", actual, "0, or rewards"))
    return Regression(count, centre) if name == "regression" else KINDS[name](count)


def tokenizer_of(context: RunContext, words: bool, **more: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the config names, or train the embedded one. Collective.

    `words`: its texts are words that are given apart.
    """
    options: dict[str, object] = dict(more)
    section = context.section
    if words and tokenizer_name(section) is not None:
        # some tokenizers have to be told that a space is before each word
        options["add_prefix_space"] = True
    return named_tokenizer(section, load_any_tokenizer, context.ranks, context.progress, **options)


def _check(context: RunContext) -> None:
    """Raise ConfigError for what a script hands in, and for keys that this task does not read."""
    handed_in = context.handed_in
    for key in ("model", "data", "loss", "evaluation_data"):
        if getattr(handed_in, key) is not None:
            expected = "none: the config names what is trained"
            raise ConfigError(Problem(key, f'a {key}, with the task "labels"', expected))
    section = context.section
    if section.data.path is None:
        raise ConfigError(Problem("trainer.data.path", "nothing", "labelled rows"))
    if section.labels.names and section.labels.kind in ("reward", "regression"):
        actual = f"names, and labels of the kind {section.labels.kind}"
        raise ConfigError(Problem("trainer.labels.names", actual, "none: it has no classes"))


def _check_records(data: DataSection, kind: Name) -> None:
    """Raise ConfigError for a kind of rows that is not read, or for columns without a meaning."""
    read = RECORDS if kind == "reward" else ("auto",)
    if data.records not in read:
        expected = "one of " + ", ".join(f'"{name}"' for name in read)
        raise ConfigError(
            Problem("trainer.data.records", f'"{data.records}", with {kind}', expected)
        )
    usual = DataSection()
    for key in ("prompt_column", "chosen_column", "rejected_column"):
        value = getattr(data, key)
        if kind != "reward" and value != getattr(usual, key):
            place = f"trainer.data.{key}"
            raise ConfigError(Problem(place, f'"{value}", with {kind}', "pairs of answers"))


def _check_classes(
    base: BaseClasses, kind: LabelKind, data: LabelData, new_head: bool, section: TrainerSection
) -> None:
    """Raise ConfigError if the head of a base that is a classifier has other classes."""
    if not base.is_classifier or new_head or base.count == kind.count:
        return
    actual = f"{base.count} classes, and {kind.count} of the data"
    hint = "Set trainer.labels.names, in order, for a new head; or name a base without one."
    place = f"trainer.model.name_or_path: {section.model.name_or_path}"
    raise ConfigError(Problem(place, actual, "as many", hint))


def _check_fit(spec: ModelSpec, data: LabelData) -> None:
    """Raise unless the model has an id for each token, and a position."""
    table = built(spec).get_input_embeddings()
    check_ids(spec.name, len(table.weight), data.largest_token_id)
    positions = spec.language.positions
    if positions is not None and data.longest > positions:
        expected = f"at most the model's {positions} positions"
        hint = f"Set trainer.data.sequence_length={positions}"
        actual = f"a sequence of {data.longest} tokens"
        raise ConfigError(Problem("trainer.data.sequence_length", actual, expected, hint))


def _notes(kind: LabelKind, tokenizer: PreTrainedTokenizerBase, padding: int) -> Iterator[str]:
    """Say it if texts end with the token that pads: the head takes the score before it."""
    ends = kind.name == "reward" and tokenizer.eos_token_id == padding
    if ends:
        yield (
            "the token that ends texts also pads: a head on the last token takes the one before it"
        )


def flops_of(spec: ModelSpec, section: TrainerSection) -> float:
    """Return the FLOPs of training on one token of a sequence."""
    return flops_per_token(spec, section.data.sequence_length)
