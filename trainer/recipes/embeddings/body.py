"""The model of embeddings: a Hugging Face body without a head, causal or bidirectional."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.config import TrainerSection
from trainer.errors import ConfigError, DataError, Problem
from trainer.layout import Layout
from trainer.models import huggingface
from trainer.models.language.auto_class import BODIES
from trainer.models.spec import ModelSpec
from trainer.models.tiny_config import VOCABULARY
from trainer.probes.probe import TOLERANCE, Finding, observe, tiny
from trainer.recipes.embeddings.data import TextSample, TextTokens
from trainer.recipes.embeddings.task import EmbeddingTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

LENGTHS = ((7, 12), (3, 9), (11, 5), (6, 8))
"""The tokens of each text of the samples on which a model is tried."""


def body_of(
    config: PreTrainedConfig, section: TrainerSection, *, weights: bool = True
) -> ModelSpec:
    """Build the spec of the body of an architecture, as transformers' AutoModel.

    Raises ConfigError for one that can't be built, or whose loss has terms of its own.
    """
    options = section.model.model_copy(update={"keep_untrained": False})
    spec = huggingface.spec_of(config, options, weights=weights, kind=BODIES)
    if spec.language.own_loss:
        actual = "true: a router's loss, which is no part of this task's"
        raise ConfigError(Problem("trainer.model.config: output_router_logits", actual, "false"))
    files = replace(spec.files, opens="sentence_transformers.SentenceTransformer")
    return replace(spec, files=files)


def tried_body(spec: ModelSpec, task: EmbeddingTask) -> ModelSpec:
    """Return the spec with the texts on which it and its tiny copies are tried."""
    return spec.tried_on(task.trial(made_up(min(VOCABULARY, spec.language.vocabulary))))


def check_padding(spec: ModelSpec, task: EmbeddingTask) -> None:
    """Raise ConfigError if other texts of a micro-batch, by their length, move a text's vector.

    Tried on a tiny copy, in evaluation.
    """

    def moved() -> float:
        small, model = tiny(spec)
        model.eval()
        samples = made_up(min(VOCABULARY, small.language.vocabulary))
        with torch.no_grad():
            together = task.vectors(model, task.collate(samples))
            alone = [task.vectors(model, task.collate([sample])) for sample in samples]
        return float((together - torch.cat(alone)).abs().max() / together.abs().max())

    result = observe(moved)
    place = f"trainer.model: {spec.name}"
    expected = "a body whose vectors depend on no padding"
    if isinstance(result, Finding):
        raise result.error(place, expected, start="a tiny copy of it does not run: ")
    if not result <= TOLERANCE:
        hint = "Its attention does not look at attention_mask: take another body."
        actual = f"on a tiny copy, padding moves vectors by {result:.1e} of the largest value"
        raise ConfigError(Problem(place, actual, expected, hint))


def made_up(vocabulary: int) -> list[TextSample]:
    """Draw samples of an anchor and a positive, with tokens that no model has another use for."""
    rng = np.random.default_rng(0)
    samples: list[TextSample] = []
    for number, lengths in enumerate(LENGTHS):
        tokens = [rng.integers(4, vocabulary, length).astype(np.int32) for length in lengths]
        texts = np.array([2 * number, 2 * number + 1])
        samples.append({"tokens": tokens, "texts": texts, "real": True})
    return samples


def task_of(section: TrainerSection, spec: ModelSpec, work: TextTokens | None) -> EmbeddingTask:
    """Build the task of a body; `work`: how its texts are tokenised, if that is known."""
    options = section.embeddings
    padding = (work.tokenizer.pad_token_id if work else 0) or 0
    skipped = (0, 0)
    if work is not None and not options.include_prompt:
        skipped = work.prompt_length(work.query), work.prompt_length(work.document)
    return EmbeddingTask.of(options, padding, skipped, spec.language.hidden_size or 0)


def check_layout(layout: Layout) -> None:
    """Raise ConfigError for a layout that splits what the loss or the pooling needs whole."""
    if layout.context > 1:
        actual = f"{layout.context}: a rank would pool a part of each text"
        expected = "1: texts are short, and a step has many"
        raise ConfigError(Problem("sequence_parallel_size", actual, expected))


def padding_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a padding token its end of text for it, as masks hide it.

    Raises DataError for one that has neither.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            hint = "Set pad_token in its tokenizer_config.json"
            actual = "neither a padding token nor an end of text"
            raise DataError(Problem("trainer.data.tokenizer", actual, "one of them", hint))
        tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token})
