"""The checks and preparations of a run before the first byte of the model is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from torch import nn

from trainer.config import Config, RuntimeFacts, resolve, support
from trainer.config.sections import TrainerSection
from trainer.config.validate import profile_problems
from trainer.data.chat import Template
from trainer.data.dataset import Pairs, pairs_of
from trainer.data.images import ImageData
from trainer.data.prepare import Data, open_data
from trainer.data.progress import Progress
from trainer.data.tokenizer import embedded_tokenizer, load_tokenizer
from trainer.distributed.ranks import Ranks
from trainer.engines import EngineKind, Machine, select
from trainer.errors import ConfigError, DataError, Problem, shared
from trainer.layout import Layout, layout_of
from trainer.models import huggingface, module
from trainer.models.checks import Alone
from trainer.models.code import code_of
from trainer.models.frozen import frozen
from trainer.models.lora import adapted
from trainer.models.spec import ModelSpec
from trainer.models.tuned import tuned
from trainer.optim.decay import spared
from trainer.parallel.checks import checked
from trainer.run.images import image_subject, workers_of
from trainer.run.process import cache_folder, has_bf16
from trainer.run.threads import share_of_cores
from trainer.tasks.causal_lm import CausalLM
from trainer.tasks.image_classification import ImageClassification
from trainer.tasks.supervised import Loss, Supervised
from trainer.tasks.task import Task
from trainer.trackers import require


@dataclass(frozen=True)
class Prepared:
    """Everything known about a run before the first byte of the model is allocated."""

    config: Config
    layout: Layout
    engine_name: str
    engine: EngineKind
    spec: ModelSpec
    task: Task
    data: Data | Pairs | ImageData
    tokenizer: Any
    """The tokenizer of a language model; None for any other."""
    steps: int
    model_notes: tuple[str, ...]
    """The findings on a tiny copy of the model, a line each."""
    learned: int
    """The number of parameters that the optimizer trains, without those that get no gradient from text."""
    undecayed: dict[str, int]
    """Those of them without weight decay, with their sizes."""
    workers: int
    """Processes of each rank that load samples; 0: a thread."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests, by name, of the user's own code with which a checkpoint was trained."""


@dataclass(frozen=True)
class Given:
    """Objects from a script, in place of those that the config names."""

    model: Callable[[], nn.Module] | None = None
    data: Any = None
    loss: Loss | None = None
    evaluation_data: Any = None
    blocks: str | None = None


@dataclass(frozen=True)
class Subject:
    """The subject of training: a model, its task and its data."""

    spec: ModelSpec
    task: Task
    data: Data | Pairs | ImageData
    tokenizer: Any = None
    packed: bool = False
    """True if a sample may be several documents that must not see one another."""


def prepare(
    config: Config,
    machine: Machine,
    given: Given | None = None,
    terminal: Console | None = None,
    *,
    builds: bool = True,
) -> Prepared:
    """Check everything that can be wrong, the cheapest checks first, and return what is known. Collective.

    Without `builds`, nothing will be built: this machine need not have what the engine requires.
    """
    ranks, section = machine.ranks, config.trainer
    bf16 = has_bf16(machine.device)
    kind: Any = machine.device.type
    facts = RuntimeFacts(ranks.world_size, None, None, bf16, kind, machine.local_world_size)
    config = resolve(config, facts)
    layout = layout_of(config, ranks.world_size)
    name, engine = select(section.engine, layout, config, kind)
    if builds:
        ranks.on_each(lambda: engine.ready(layout, machine.device, config.deepspeed))
    if layout.offloads and (note := share_of_cores(machine.local_world_size or 1)):
        config = replace(config, notes=(*config.notes, note))
    ranks.on_first(lambda: require(section.log.trackers))
    machine.signs.at("reading what the model and its data are")
    if section.task == "image_classification":
        subject = _images(config, given or Given(), layout, ranks)
    else:
        progress = Progress(terminal, machine.watch.moves, machine.signs)
        subject = subject_of(config, given, ranks) if given else _language_model(config, ranks, progress)
    data = subject.data
    machine.signs.at("trying a tiny copy of the model")
    spec, model_notes = checked(subject.spec, subject.task, layout, ranks, subject.packed)
    ranks.on_first(lambda: engine.check(spec, layout))
    ranks.on_first(lambda: regularised(subject.task, spec, section) and None)  # an error is reported once
    task = regularised(subject.task, spec, section)
    if section.log.by_source and isinstance(task, CausalLM):
        task = task.watching(len(section.data.sources))
    steps = section.steps or max(1, math.ceil((section.epochs or 1) * len(data.train) / layout.train_batch))
    if problems := profile_problems(section, steps):
        raise shared(ConfigError(*problems))
    config = resolve(config, replace(facts, hidden_size=spec.language.hidden_size, total_steps=steps))
    config = replace(config, notes=(*config.notes, *support.notes(config, name)))
    model = spec.build()
    learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    undecayed = spared(section.weight_decay_excludes, spec)
    known = (config, layout, name, engine, spec, task, data, subject.tokenizer, steps, model_notes, learned, undecayed)
    workers = workers_of(section, machine) if isinstance(data, ImageData) else 0
    own = {"loss": given.loss, "model": given.model} if given else {}
    return Prepared(*known, workers, code_of(model, **own))


def amended(spec: ModelSpec, section: TrainerSection, ranks: Ranks, *, copied: bool = False) -> ModelSpec:
    """Apply the config's changes to a model's spec; `copied` if the config means a larger model. Collective.

    Raises ConfigError for changes that do not fit the model.
    """

    def changed() -> ModelSpec:
        held = frozen(adapted(spec, section.adapter), section.freeze, copied=copied)
        return tuned(held, section.parameter_groups, copied=copied)

    ranks.on_first(lambda: changed() and None)  # an error is reported once
    return changed()


def regularised(task: Task, spec: ModelSpec, section: TrainerSection) -> Task:
    """Return the task as trained: with label smoothing and noise on embeddings, if requested.

    Earlier checks run without them. Raises ConfigError for a task or a model that does not support them.
    """
    smoothing, alpha = section.label_smoothing, section.neftune_alpha
    if alpha and not isinstance(task, CausalLM):
        seen = f"saw {alpha:g}, and no language model"
        raise ConfigError(Problem("trainer.neftune_alpha", seen, "noise on the embeddings of tokens"))
    if isinstance(task, CausalLM):
        if alpha and not isinstance(embeddings_of(spec), nn.Embedding):
            seen = f"{spec.name} has no table of input embeddings that a forward pass would look tokens up in"
            raise ConfigError(Problem("trainer.neftune_alpha", seen, "a model with one"))
        return task.regularised(smoothing, alpha)
    if isinstance(task, ImageClassification):
        return task.regularised(smoothing)
    if smoothing:
        seen = f"saw {smoothing:g}, and a loss that is handed in"
        raise ConfigError(Problem("trainer.label_smoothing", seen, "0: an own loss smooths its labels itself"))
    return task


def embeddings_of(spec: ModelSpec) -> Any:
    with suppress(NotImplementedError, AttributeError):  # transformers raises it for a family that it does not know
        return spec.build().get_input_embeddings()  # type: ignore[operator]
    return None


def subject_of(config: Config, given: Given, ranks: Ranks) -> Subject:
    """Build the subject of an own module on own data. Raises ConfigError if the config names one, too. Collective."""
    section = config.trainer
    named = {
        "trainer.model.name_or_path": section.model.name_or_path,
        "trainer.model.config": section.model.config,
        "trainer.data.path": section.data.path,
    }
    for key, value in named.items():
        if value is not None:
            raise ConfigError(Problem(key, str(value), "nothing: the model and the data are handed in"))
    if given.model is None or given.data is None or given.loss is None:
        expected = 'a model, data and a loss, or the task "image_classification"'
        raise ConfigError(Problem("train", "not all of what is trained", expected))
    data = pairs_of(given.data, given.evaluation_data, section.data.evaluation_fraction)
    spec = module.spec_of(given.model, given.blocks, section.seed)
    task = Supervised(given.loss, spec.build, spec.blocks)
    first = [data.train[i] for i in range(min(4, len(data.train)))]
    ranks.on_first(Alone()(lambda: task.collate(first) and None))  # an error in them is reported once
    return Subject(replace(amended(spec, section, ranks), trial=task.trial(first)), task, data)


def _images(config: Config, given: Given, layout: Layout, ranks: Ranks) -> Subject:
    if given.loss is not None:
        seen = 'a loss, with the task "image_classification"'
        raise ConfigError(Problem("loss", seen, "none: it is the cross entropy", "Leave trainer.task out."))
    own = None if given.data is None else (given.data, given.evaluation_data)
    found = image_subject(config.trainer, ranks, layout, cache_folder(), given.model, given.blocks, own)
    return Subject(amended(found[0], config.trainer, ranks), *found[1:])


def _language_model(config: Config, ranks: Ranks, progress: Progress) -> Subject:
    section = config.trainer
    architecture = ranks.on_own(lambda: huggingface.read_config(section.model))
    tokenizer = _tokenizer(config, ranks, progress)
    data = open_data(section.data, tokenizer, cache_folder(), ranks, section.seed, progress)
    if data.has_chats:  # saved with the trained model, so that it is prompted as it was trained
        template = Template.of(tokenizer, section.data.chat_template)
        tokenizer.chat_template = template.text or tokenizer.chat_template
    spec = amended(huggingface.spec_of(architecture, section.model), section, ranks)
    _check_vocabulary(data.largest_token_id, spec)
    _check_length(section.data.sequence_length, architecture)
    spec = replace(spec, notes=(*spec.notes, *_say_rotary(section.data.sequence_length, architecture)))
    task = CausalLM.of(spec, tokenizer.pad_token_id or 0)
    return Subject(spec, task, data, tokenizer, section.data.packs)


def _tokenizer(config: Config, ranks: Ranks, progress: Progress) -> Any:
    data, model = config.trainer.data, config.trainer.model
    name = data.tokenizer or model.name_or_path
    if name is None:
        load = lambda: embedded_tokenizer(cache_folder(), progress=progress)  # noqa: E731
        ranks.on_first(lambda: load() and None)  # the rank that trains it
        return load()
    return ranks.on_own(lambda: load_tokenizer(name, model.trust_remote_code, model.revision))


def _check_vocabulary(largest: int, spec: ModelSpec) -> None:
    if largest >= spec.language.vocabulary:
        raise DataError(
            Problem(
                "tokenizer",
                f"the data has token id {largest}",
                f"ids below {spec.language.vocabulary}, the rows of the embedding of {spec.name}",
                "Use the model's own tokenizer (trainer.data.tokenizer), or a vocab_size that holds all ids",
            )
        )


def _check_length(sequence: int, architecture: Any) -> None:
    longest = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise ConfigError(
            Problem("trainer.data.sequence_length", str(sequence), f"at most the model's {longest} positions")
        )


def _say_rotary(sequence: int, architecture: Any) -> tuple[str, ...]:
    """Warn if rotary embeddings depend on the longest row of a micro-batch: a tiny copy's rows are too short."""
    rope = getattr(architecture.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    limits = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    if not (reached := [limit for limit in limits if limit and sequence > limit]):
        return ()
    line = (
        f"its rotary embeddings (longrope) turn otherwise in a micro-batch with a row of more than {reached[0]} tokens"
    )
    return (f"{line}: its loss depends on which samples share a micro-batch",)
