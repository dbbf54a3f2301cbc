"""A model with transformers' own head for labels, as a spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from trainer.config.sections.model_and_data import ModelSection
from trainer.config.sections.trainer import TrainerSection
from trainer.errors import ConfigError, Problem, listed
from trainer.models import huggingface
from trainer.models.language.auto_class import SEQUENCES, TOKENS, AutoClass
from trainer.models.language.forward import without_cache
from trainer.models.spec import ModelSpec, Weights
from trainer.models.tiny_config import SIZES
from trainer.recipes.labels.kinds import LabelKind, Labelled
from trainer.recipes.labels.task import LabelTask
from trainer.tasks.task import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

LENGTHS = (12, 5, 9, 1)
"""The tokens of the sequences on which a copy is tried."""


def auto_class_of(kind: LabelKind) -> AutoClass:
    return TOKENS if kind.name == "tokens" else SEQUENCES


class BaseClasses:
    """The classes of a base that is a classifier of the wanted kind already; else none."""

    def __init__(self, config: PreTrainedConfig, tokens: bool) -> None:
        suffix = "ForTokenClassification" if tokens else "ForSequenceClassification"
        stated = getattr(config, "architectures", None) or [""]
        self.is_classifier = str(stated[0]).endswith(suffix)
        labels = dict(sorted((int(key), str(value)) for key, value in config.id2label.items()))
        self.count = len(labels) if self.is_classifier else 0
        named = any(name != f"LABEL_{number}" for number, name in labels.items())
        self.names = tuple(labels.values()) if self.is_classifier and named else ()


def labelled_config(
    config: PreTrainedConfig, kind: LabelKind, names: Sequence[str], padding: int
) -> None:
    """Set a config's classes, its loss and its padding token, in place."""
    known = list(names) or [f"LABEL_{number}" for number in range(kind.count)]
    id2label = dict(enumerate(known))
    label2id = {name: number for number, name in id2label.items()}
    config.update({"id2label": id2label, "label2id": label2id, "problem_type": kind.problem})
    for part in (config, config.get_text_config()):
        part.update({"pad_token_id": padding})


def padding_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that pads: the model's, else the tokenizer's, else that which ends texts.

    Raises ConfigError if there is none.
    """
    known = (config.get_text_config().pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    for token in known:
        if isinstance(token, int) and token >= 0:
            return token
    actual = "neither the model nor its tokenizer has a padding token, or one that ends texts"
    raise ConfigError(Problem("trainer.data.tokenizer", actual, "pad_token in its config"))


def spec_of(
    config: PreTrainedConfig,
    options: ModelSection,
    kind: LabelKind,
    *,
    weights: bool = True,
    new_head: bool = False,
) -> ModelSpec:
    """Build the spec of an architecture with a head for labels; its base may have none.

    `new_head`: the head of a base that is a classifier is not read. Raises ConfigError.
    """
    _check_router(config, options)
    whole = options.model_copy(update={"keep_untrained": False})
    spec = huggingface.spec_of(config, whole, weights=weights, kind=auto_class_of(kind))
    spec = with_trial(spec, kind)
    return with_new_head(spec, new_head) if options.name_or_path and weights else spec


def task_of(spec: ModelSpec, kind: LabelKind) -> LabelTask:
    """Build the task of training this model."""
    model = built(spec)
    padding = model.config.get_text_config().pad_token_id
    return LabelTask(kind, padding, spec.language.hidden_size, without_cache(model))


def built(spec: ModelSpec) -> PreTrainedModel:
    """Build the model of a spec, which is of a class of transformers."""
    model = spec.build()
    assert isinstance(model, PreTrainedModel)
    return model


def with_trial(spec: ModelSpec, kind: LabelKind) -> ModelSpec:
    """Return the spec with the samples on which its tiny copies are tried: their padding is 0."""
    model = built(spec)
    task = LabelTask(kind, 0, spec.language.hidden_size, without_cache(model))
    ids = min(spec.language.vocabulary, SIZES.vocabulary)  # of a tiny copy
    return spec.tried_on(task.trial(made_up(kind, LENGTHS, ids)))


def made_up(
    kind: LabelKind, lengths: Sequence[int], vocabulary: int, seed: int = 0
) -> list[Labelled]:
    """Draw samples of these lengths, whose tokens are not 0, the padding of a tiny copy.

    A third of the tokens that have a class each has none.
    """
    rng = np.random.default_rng(seed)

    def ids(length: int) -> np.ndarray:
        return rng.integers(1, vocabulary, length).astype(np.int32)

    def sample(length: int) -> Labelled:
        if kind.name == "reward":
            other = int(rng.integers(1, length + 1))
            sides = {"chosen": ids(length), "rejected": ids(other)}
            return {**sides, "margin": float(rng.random())}
        tokens = ids(length)
        labels: int | np.ndarray = int(rng.integers(kind.count))
        if kind.name == "tokens":
            labels = rng.integers(0, kind.count, length).astype(np.int32)
            labels[1:][rng.random(length - 1) < 1 / 3] = IGNORED
        elif kind.name == "multi":
            labels = rng.integers(0, 2, kind.count).astype(np.float32)
        elif kind.name == "regression":
            labels = rng.standard_normal(kind.count).astype(np.float32)
        return {"input_ids": tokens, "labels": labels}

    return [sample(length) for length in lengths]


def _check_router(config: PreTrainedConfig, options: ModelSection) -> None:
    """Raise ConfigError for a router's loss, which the heads of transformers leave out."""
    if getattr(config.get_text_config(), "output_router_logits", False):
        actual = "a router's loss (output_router_logits), which its head for labels leaves out"
        place = f"trainer.model: {options.name_or_path or config.model_type}"
        raise ConfigError(Problem(place, actual, "output_router_logits false"))


class _WithoutHead(Weights):
    """The weights of a base without those of its head."""

    def __init__(self, weights: Weights, left_out: frozenset[str]) -> None:
        self._weights = weights
        self._left_out = left_out

    def read(self, name: str) -> torch.Tensor | None:
        return None if name in self._left_out else self._weights.read(name)

    def release(self) -> None:
        self._weights.release()


def with_new_head(spec: ModelSpec, new_head: bool) -> ModelSpec:
    """Return the spec of a base whose head begins at random, where the base has none.

    What may be new: modules outside of the body, and a pooler in it.
    """
    model = built(spec)
    body = f"{model.base_model_prefix}."
    weights = spec.building.weights
    names = [name for name, _ in model.named_parameters()]
    of_head = [name for name in names if not name.startswith(body)]
    poolers = [name for name in names if ".pooler." in name and name not in of_head]
    absent = [name for name in (*of_head, *poolers) if weights.read(name) is None]
    fresh = frozenset(absent) | (frozenset(of_head) if new_head else frozenset())
    if not fresh:
        return spec
    if new_head:
        spec = spec.with_weights(_WithoutHead(weights, fresh))
    begins = f"{listed(sorted(fresh))} of {spec.name} begin at random (trainer.seed)"
    training = replace(spec.training, fresh=spec.training.fresh | fresh)
    return replace(spec, training=training, notes=(*spec.notes, begins))


def with_trained_head(section: TrainerSection, spec: ModelSpec) -> TrainerSection:
    """Return the config in which an adapter's `modules_to_save` has the head, as in PEFT.

    So has a pooler that begins at random. An adapter that is started from says itself what it has.
    """
    adapter = section.adapter
    if adapter is None or adapter.path is not None:
        return section
    model = built(spec)
    inside = f"{model.base_model_prefix}."
    named = [name for name, _ in model.named_parameters()]
    whole = dict.fromkeys(name.partition(".")[0] for name in named if not name.startswith(inside))
    poolers = [
        name.partition(".pooler.")[0] + ".pooler"
        for name in sorted(spec.training.fresh)
        if name.startswith(inside) and ".pooler." in name
    ]
    wanted = [
        name for name in dict.fromkeys((*whole, *poolers)) if name not in adapter.modules_to_save
    ]
    saved = [*adapter.modules_to_save, *wanted]
    return section.model_copy(
        update={"adapter": adapter.model_copy(update={"modules_to_save": saved})}
    )
