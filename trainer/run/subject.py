"""The model, task and data of a run, with all that is particular to the task: a class for each.

Nobody else asks which task it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from trainer.config import Config
from trainer.config.sections.trainer import TrainerSection
from trainer.data.cache import NOTHING, Check
from trainer.data.dataset import pairs_of
from trainer.data.images.image_samples import open_images
from trainer.data.progress import Progress
from trainer.data.remote import fetched
from trainer.data.stream import Place, Stream
from trainer.data.text.arrangement import Arranged, arranged
from trainer.data.text.chat import Template
from trainer.data.text.preparation import open_data
from trainer.data.text.preview import preview
from trainer.data.text.tokenizer import embedded_tokenizer, load_tokenizer
from trainer.distributed.ranks import Ranks
from trainer.engines import Machine, Metrics
from trainer.errors import ConfigError, DataError, Problem, refused
from trainer.layout import Layout
from trainer.models import huggingface
from trainer.models.finetuning.frozen import frozen
from trainer.models.finetuning.lora import adapted
from trainer.models.finetuning.tuned import tuned
from trainer.models.own import module
from trainer.models.own_vocabulary import align
from trainer.models.spec import ModelSpec, flops_per_token
from trainer.parallel.checks import packing_refusal
from trainer.parallel.parallel_mesh import division_of
from trainer.plugins import NAMED
from trainer.run import images
from trainer.run.evaluate import beginning, continuation
from trainer.supervise.process import cache_folder, cores
from trainer.tasks.attention import notes
from trainer.tasks.causal_lm import CausalLM
from trainer.tasks.harness import check_tasks
from trainer.tasks.image_classification import ImageClassification
from trainer.tasks.supervised import Loss, Supervised
from trainer.tasks.task import Task
from trainer.trial.setup import Alone

MOST_WORKERS = 8


@dataclass(frozen=True)
class Given:
    """Objects from a script, in place of those that the config names."""

    model: Callable[[], nn.Module] | None = None
    data: Any = None
    loss: Loss | None = None
    evaluation_data: Any = None
    blocks: str | None = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)

    @staticmethod
    def by_task(section: TrainerSection, given: Given | None) -> Given | None:
        """Return what a plug-in's task names, or else `given`. Raises ConfigError."""
        if (task := NAMED["task"].get(section.task)) is None:
            return given
        expected = "the arguments of trainer.train for what is trained"
        # whatever the plug-in's own code raises
        with refused("trainer.task", expected, named=True):
            return replace(given or Given(), **task(section))


@dataclass(frozen=True)
class Subject:
    """A model, its task and its data: here an own module on pairs, with its own loss."""

    spec: ModelSpec
    task: Task
    data: Any
    """`Data`, `Pairs` or `ImageData`."""
    tokenizer: Any = None
    packed: bool = False
    """True if a sample may hold several documents that are not to see one another."""
    check: Check = NOTHING
    """The comparison of prepared data with what was written."""
    unit: ClassVar[str] = "tok"
    """The short name of what rates count."""

    def settled(self, config: Config) -> Config:
        """The config with what the data has decided, and with its origin."""
        return config

    def trained(self, spec: ModelSpec, section: TrainerSection) -> Subject:
        """The subject with the checked `spec` and the task as it is trained. Raises ConfigError."""
        task = self.task.regularised(spec, section.label_smoothing, section.neftune_alpha)
        return replace(self, spec=spec, task=task)

    def reading(self, place: Sequence[Any]) -> AbstractContextManager[object]:
        """Have a stream of data read from a place (`data.stream.Place`) within the context."""
        return nullcontext()

    def workers(self, section: TrainerSection, machine: Machine) -> int:
        """Processes of each rank that load samples; 0: a thread."""
        return 0

    def lines(self, workers: int) -> Iterator[str]:
        """Lines of the plan about the data."""
        yield from (f"note    data: {note}" for note in self.data.notes)

    def kernels(self, layout: Layout, device: torch.device) -> Iterator[str]:
        """Set the order of a GPU's attention kernels, and say in lines which ones run."""
        yield from ()

    def amount(self, samples: int, section: TrainerSection) -> str:
        """The end of the plan's line about so many samples."""
        return ""

    def flops(self, section: TrainerSection) -> float | None:
        """FLOPs of a training step for each token; None where it is not known."""
        return None

    def samples(self, numbers: list[int], **options: Any) -> str:
        """Samples as a person can read them; empty where nobody can."""
        return ""

    def loading_advice(self, workers: int) -> str:
        """The end of the note that the device waits for data."""
        return ""

    def is_named(self, section: TrainerSection) -> bool:
        """True if the config says all of what is trained, so that another process can plan it."""
        return None not in (section.model.name_or_path, section.data.path)

    def describe_to(self, planned: dict[str, Any]) -> None:
        """Add what is known since the data was opened to a config that is to be planned."""

    def measures(self, loss: float) -> dict[str, float]:
        """Further figures of an evaluation, by name."""
        return {}

    def losses_by_source(self, metrics: Metrics, device: torch.device) -> dict[str, float] | None:
        """Return training losses since the last call, by source, if asked for. Collective."""
        return None

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the model's files that hold no tensors, beside weights of this dtype.

        Raises DiskError if the folder would open as another model.
        """
        self.spec.files.save_config(folder, dtype)
        self.spec.files.check(folder)

    def example(self, folder: Path, section: TrainerSection) -> str | None:
        """Text that the trained model in `folder` goes on with, if the config asks for some."""
        return None


@dataclass(frozen=True)
class LanguageSubject(Subject):
    """A causal language model on documents."""

    task: CausalLM
    form: Arranged = Arranged("concatenate")
    """The arrangement of documents in samples."""

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

    def reading(self, place: Sequence[Any]) -> AbstractContextManager[object]:
        if not isinstance(stream := self.data.train, Stream):
            return nullcontext()
        stream.begin(Place(*place))
        return closing(stream)

    def lines(self, workers: int) -> Iterator[str]:
        yield from (f"source  {line}" for line in self.data.lines())

    def kernels(self, layout: Layout, device: torch.device) -> Iterator[str]:
        model, dtype = self.task.attention(), getattr(torch, layout.precision)
        divided = division_of(layout, self.spec.language.heads).groups > 1
        return notes(model, self.spec, self.packed, dtype, device, divided)

    def amount(self, samples: int, section: TrainerSection) -> str:
        tokens, flops = samples * section.data.sequence_length, self.flops(section) or 0.0
        return f", at most {tokens / 1e6:,.1f} M tokens, {flops / 1e6:,.0f} MFLOP a token"

    def flops(self, section: TrainerSection) -> float | None:
        return flops_per_token(self.spec, section.data.sequence_length)

    def samples(self, numbers: list[int], **options: Any) -> str:
        return preview(self.data.train, self.tokenizer, numbers, **options)

    def is_named(self, section: TrainerSection) -> bool:
        return True

    def describe_to(self, planned: dict[str, Any]) -> None:
        model = planned["model"]
        if model["name_or_path"] is None:  # its vocabulary is the tokenizer's
            rows = {"vocab_size": self.spec.language.vocabulary}
            told = huggingface.stated(model["config"])
            model["config"] = {**rows, **told} if told else {**huggingface.EMBEDDED, **rows}

    def measures(self, loss: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(loss, 700.0))}

    def losses_by_source(self, metrics: Metrics, device: torch.device) -> dict[str, float] | None:
        if (by_source := self.task.by_source) is None:
            return None
        losses, targets = by_source.take(metrics.group, device).tolist()
        found = zip(self.data.shares, losses, targets, strict=True)
        return {share.label: loss / count for share, loss, count in found if count}

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        super().save(folder, dtype)
        self.tokenizer.save_pretrained(folder)

    def example(self, folder: Path, section: TrainerSection) -> str | None:
        wanted = section.generate
        if wanted.prompt is None:
            return None
        source = next(iter(self.data.evaluations.values()), self.data.train)
        room = section.data.sequence_length - wanted.tokens
        prompt = beginning(source, room) if wanted.prompt == "auto" else wanted.prompt
        trust = section.model.trust_remote_code
        return continuation(folder, self.tokenizer, prompt, wanted.tokens, trust)


@dataclass(frozen=True)
class ImageSubject(Subject):
    """A classifier of labelled images."""

    task: ImageClassification

    unit: ClassVar[str] = "img"

    def workers(self, section: TrainerSection, machine: Machine) -> int:
        """On a GPU as many as there are cores for; on the CPU those are busy."""
        if section.images.workers is not None:
            return section.images.workers
        if machine.device.type == "cpu":
            return 0
        sharers = machine.local_world_size or machine.ranks.world_size
        return max(1, min(MOST_WORKERS, cores() // sharers - 1))

    def lines(self, workers: int) -> Iterator[str]:
        whose = f"{workers} workers on each rank" if workers else "a thread on each rank"
        yield from (f"images  {line}" for line in (*self.data.lines(), f"loaded by {whose}"))

    def loading_advice(self, workers: int) -> str:
        return f"; raise trainer.images.workers (now {workers})"

    def describe_to(self, planned: dict[str, Any]) -> None:
        found = self.data.images
        size, classes = list(found.size), len(found.classes)
        planned["images"] |= {"size": size, "mode": found.mode, "classes": classes}
        planned["data"]["path"] = None


def subject_class(section: TrainerSection, given: Given | None) -> type[Subject]:
    """Return the kind of what a config names or a script hands in."""
    if section.task == "image_classification":
        return ImageSubject
    return LanguageSubject if given is None else Subject


def subject_of(
    config: Config,
    given: Given | None,
    layout: Layout,
    ranks: Ranks,
    progress: Progress,
    order: int,
) -> Subject:
    """Build the subject that a config names or a script hands in, its data in the version `order`
    of the samples' order. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    kind, handed_in = subject_class(config.trainer, given), given or Given()
    data = fetched(config.trainer.data, cache_folder(), ranks, progress)
    config = replace(config, trainer=config.trainer.model_copy(update={"data": data}))
    if kind is ImageSubject:
        found = image_classifier(config, handed_in, layout, ranks)
        return replace(found, spec=amended(found.spec, config.trainer, ranks))
    if kind is LanguageSubject:
        return language_model(config, layout, ranks, progress, order)
    return own_module(config, handed_in, ranks)


def amended(
    spec: ModelSpec, section: TrainerSection, ranks: Ranks, *, copied: bool = False
) -> ModelSpec:
    """Apply the config's changes to a model's spec; `copied` if the config means a larger model.
    Collective.

    Raises ConfigError for changes that do not fit the model.
    """

    def changed() -> ModelSpec:
        held = frozen(adapted(spec, section.adapter), section.freeze, copied=copied)
        return tuned(held, section.parameter_groups, copied=copied)

    ranks.on_first(lambda: changed() and None)  # an error is reported once
    return changed()


def own_module(config: Config, given: Given, ranks: Ranks) -> Subject:
    """Build the subject of an own module on own data. Raises ConfigError. Collective."""
    section = config.trainer
    if given.model is None or given.data is None or given.loss is None:
        expected = 'a model, data and a loss, or metrics of the task "image_classification" alone'
        raise ConfigError(Problem("train", "not all of what is trained", expected))
    named = {
        "trainer.model.name_or_path": section.model.name_or_path,
        "trainer.model.config": section.model.config,
        "trainer.data.path": section.data.path,
        "trainer.evaluation.tasks": section.evaluation.tasks or None,
    }
    for key, value in named.items():
        if value is not None and section.task not in NAMED["task"]:
            expected = "nothing: the model and the data are handed in"
            raise ConfigError(Problem(key, str(value), expected))
    data = pairs_of(given.data, given.evaluation_data, section.data.evaluation_fraction)
    spec = module.spec_of(given.model, given.blocks, section.seed)
    task = Supervised(given.loss, spec.build, spec.blocks)
    first = [data.train[i] for i in range(min(4, len(data.train)))]
    # an error in them is reported once
    ranks.on_first(Alone()(lambda: task.measuring(given.metrics, first) and None))
    task = task.measuring(given.metrics, first)
    return Subject(amended(spec, section, ranks).tried_on(task.trial(first)), task, data)


def image_classifier(config: Config, given: Given, layout: Layout, ranks: Ranks) -> ImageSubject:
    """A classifier, by name or handed in, on images that the config names or a script hands in."""
    section = config.trainer
    if given.loss is not None:
        actual = 'a loss, with the task "image_classification"'
        expected = "none: it is the cross entropy"
        raise ConfigError(Problem("loss", actual, expected, "Leave trainer.task out."))
    own = None if given.data is None else (given.data, given.evaluation_data)
    name, path = section.model.name_or_path, section.data.path
    for key, handed, named in (
        ("trainer.model.name_or_path", given.model, name),
        ("trainer.data.path", own, path),
    ):
        if handed is not None and named is not None:
            raise ConfigError(Problem(key, str(named), "nothing: it is handed in"))
    classifier = None
    if given.model is None:
        classifier = pretrained = ranks.on_own(lambda: images.named_in(section))
        # where it is downloaded, that is done once
        ranks.await_first(lambda: pretrained.state() and None)
    data = open_images(section.data, section.images, section.seed, cache_folder(), ranks, own)
    spec = images.spec_of(section, data.images, classifier, given.model, given.blocks)
    task = ImageClassification(len(data.images.classes), spec.build, spec.blocks)
    first = [data.train[i] for i in range(min(4, len(data.train)))]
    ranks.on_first(lambda: images.check(spec, task, data.images, data.path, layout, first))
    task = task.measuring(given.metrics, first)
    return ImageSubject(spec.tried_on(task.trial(first)), task, data)


def language_model(
    config: Config, layout: Layout, ranks: Ranks, progress: Progress, order: int
) -> Subject:
    section = config.trainer
    if section.evaluation.tasks:
        ranks.await_first(lambda: check_tasks(section.evaluation.tasks))
    architecture = ranks.on_own(lambda: huggingface.read_config(section.model))
    tokenizer = _tokenizer(config, ranks, progress)
    notes: tuple[str, ...] = ()
    if section.model.name_or_path is None:
        told = huggingface.stated(section.model.config)
        notes = ranks.on_own(lambda: align(architecture, told, tokenizer))
    spec = amended(huggingface.spec_of(architecture, section.model), section, ranks)
    task = CausalLM.of(spec, tokenizer.pad_token_id or 0)

    def refusal() -> str:
        return packing_refusal(spec, task, layout, ranks, section.model.attention)

    form = arranged(section.data, refusal, ranks)
    settled = section.data.model_copy(update={"documents": form.documents})
    data = open_data(settled, tokenizer, cache_folder(), ranks, section.seed, progress, order)
    if data.has_chats:  # saved with the trained model, so that it is prompted as it was trained
        template = Template.of(tokenizer, section.data.chat_template)
        if template.text:
            tokenizer = _tokenizer(config, ranks, progress, chat_template=template.text)
    rows, longest = spec.language.vocabulary, spec.language.positions
    sequence = section.data.sequence_length
    if (largest := data.largest_token_id) >= rows:
        expected = f"ids below {rows}, the rows of the embedding of {spec.name}"
        own = "Use the model's own tokenizer (trainer.data.tokenizer)"
        hint = f"{own}, or a vocab_size that holds all ids"
        raise DataError(Problem("tokenizer", f"the data has token id {largest}", expected, hint))
    if longest is not None and sequence > longest:
        expected = f"at most the model's {longest} positions"
        raise ConfigError(Problem("trainer.data.sequence_length", str(sequence), expected))
    notes = (*notes, *_say_rotary(sequence, architecture), *data.unrendered())
    if form.reason and form.documents == "pad":
        notes = (*notes, f"trainer.data.documents is pad: {form.reason}")
    spec = replace(spec, notes=(*spec.notes, *notes))
    return LanguageSubject(spec, task, data, tokenizer, settled.packs, data.check, form)


def _tokenizer(config: Config, ranks: Ranks, progress: Progress, **options: Any) -> Any:
    data, model = config.trainer.data, config.trainer.model
    name = data.tokenizer or model.name_or_path
    if name is None:
        load = partial(embedded_tokenizer, cache_folder(), progress=progress, **options)
        ranks.on_first(lambda: load() and None)  # the rank that trains it
        return load()
    options["revision"] = model.revision
    return ranks.on_own(lambda: load_tokenizer(name, model.trust_remote_code, **options))


def _say_rotary(sequence: int, architecture: Any) -> tuple[str, ...]:
    """Warn if rotary embeddings depend on the longest row, which a tiny copy has not."""
    rope = getattr(architecture.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    long = (kind for kind in kinds if kind.get("rope_type") == "longrope")
    limits = [kind.get("original_max_position_embeddings") for kind in long]
    reached = [limit for limit in limits if limit and sequence > limit]
    if not reached:
        return ()
    change = f"change in a micro-batch that has a row of more than {reached[0]} tokens"
    so = "its loss depends on which samples share a micro-batch"
    return (f"its rotary embeddings (longrope) {change}: {so}",)
