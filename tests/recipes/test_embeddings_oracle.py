"""The loss and gradients of embeddings are those of sentence-transformers, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.embeddings import LENGTH, WORDS, bert_folder, llama_folder
from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.distributed.seeding import seed_generators
from trainer.layout import Layout
from trainer.parallel.forward_backward import Dropout, GradientAccumulation
from trainer.probes.question import ONE_PROCESS
from trainer.recipes.embeddings.data import TextSample, TextTokens
from trainer.recipes.embeddings.sentence_files import write_modules
from trainer.recipes.embeddings.task import EmbeddingTask
from trainer.tasks.task import ModelWithLoss

SAMPLES = 6
PLAIN: dict[str, Any] = {}


def texts_of(count: int, columns: int) -> list[list[str]]:
    """Draw different texts of 1 to 12 words, some of them longer than LENGTH."""
    rng = np.random.default_rng(columns)

    def text(number: int) -> str:
        words = rng.integers(0, WORDS, 1 + rng.integers(12))
        return " ".join(f"w{word}" for word in (number, *words))

    return [[text(row * columns + column) for column in range(columns)] for row in range(count)]


def sentence_transformer(folder: Path, options: EmbeddingsSection, width: int) -> Any:
    """Open a folder as `final/` is written, by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    write_modules(folder, options, width, LENGTH)
    return SentenceTransformer(str(folder), device="cpu").double().train()


def samples_of(texts: list[list[str]], work: TextTokens) -> list[TextSample]:
    tokens, _ = work.tokens(texts)
    columns = len(texts[0])
    by_row = [tokens[at : at + columns] for at in range(0, len(tokens), columns)]
    return [
        {
            "tokens": [np.array(one, np.int32) for one in row],
            "texts": np.arange(number * columns, (number + 1) * columns),
            "real": True,
        }
        for number, row in enumerate(by_row)
    ]


def ours(
    model: nn.Module, texts: list[list[str]], options: EmbeddingsSection, tokenizer: Any, size: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss and every gradient of a step of micro-batches of `size` samples."""
    prompts = options.prompts.get("query", ""), options.prompts.get("document", "")
    work = TextTokens(tokenizer, LENGTH, *prompts)
    skipped = (0, 0)
    if not options.include_prompt:
        skipped = work.prompt_length(prompts[0]), work.prompt_length(prompts[1])
    task = EmbeddingTask.of(options, tokenizer.pad_token_id, skipped, 16)
    layout: Layout = ONE_PROCESS
    runner = GradientAccumulation(ModelWithLoss(model, task), NoDropout(), layout, torch.float32)
    samples = samples_of(texts, work)
    batches = [task.collate(samples[at : at + size]) for at in range(0, len(samples), size)]
    batches = task.compared(batches, runner.outputs(0, batches))
    scale = torch.tensor(1.0 / len(samples), dtype=torch.float64)
    loss = runner.train(0, batches, lambda: scale)
    results = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss) / len(samples), results


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of gradients, relative to the largest entry of all."""
    assert found.keys() == wanted.keys()
    largest = max(float(value.abs().max()) for value in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / largest


class NoDropout(Dropout):
    def __init__(self) -> None:
        """Seed no block: the model has no dropout."""

    def start(self, step_seed: int, micro_batch: int) -> None:
        seed_generators(step_seed)


OPTIONS = {
    "mean": PLAIN,
    "cls": {"pooling": "cls"},
    "lasttoken": {"pooling": "lasttoken"},
    "normalised": {"normalize": True},
    "dot": {"similarity": "dot", "scale": 1.0},
    "symmetric": {"symmetric": True},
    "prompts": {"prompts": {"query": "w1 w2 ", "document": "w3 "}},
    "prompts left out": {
        "prompts": {"query": "w1 w2 ", "document": "w3 "},
        "include_prompt": False,
    },
    "prompts left out, cls": {
        "prompts": {"query": "w1 w2 ", "document": "w3 "},
        "include_prompt": False,
        "pooling": "cls",
    },
}


@pytest.mark.parametrize("columns", [2, 4], ids=["pairs", "triplets"])
@pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_and_gradients_are_those_of_one_large_batch(
    given: dict[str, Any], columns: int, tmp_path: Path
) -> None:
    """Of the library, and of micro-batches of two; symmetric losses have both directions."""
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import cos_sim, dot_score

    folder = bert_folder(tmp_path / "bert")
    options = EmbeddingsSection(**given)
    theirs = sentence_transformer(folder, options, 16)
    texts = texts_of(SAMPLES, columns)
    prompts = [options.prompts.get("query", "")]
    prompts += [options.prompts.get("document", "")] * (columns - 1)
    features = [
        theirs.preprocess([row[column] for row in texts], prompt=prompt or None)
        for column, prompt in enumerate(prompts)
    ]
    kind = losses.MultipleNegativesRankingLoss
    if options.symmetric:
        kind = losses.MultipleNegativesSymmetricRankingLoss
    score = cos_sim if options.similarity == "cosine" else dot_score
    expected = kind(theirs, scale=options.scale, similarity_fct=score)(features, None)
    expected.backward()
    body = theirs[0].auto_model
    wanted = {name: p.grad.clone() for name, p in body.named_parameters() if p.grad is not None}
    theirs.zero_grad()
    loss, result = ours(body, texts, options, theirs.tokenizer, 2)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    assert furthest(result, wanted) <= 1e-9


def test_a_causal_body_is_the_same_in_micro_batches_and_cached_by_the_library(
    tmp_path: Path,
) -> None:
    from sentence_transformers.sentence_transformer import losses

    options = EmbeddingsSection(pooling="lasttoken")
    theirs = sentence_transformer(llama_folder(tmp_path / "llama"), options, 16)
    texts = texts_of(SAMPLES, 3)
    features = [theirs.preprocess([row[column] for row in texts]) for column in range(3)]
    cached = losses.CachedMultipleNegativesRankingLoss(theirs, mini_batch_size=2)
    expected = cached(features, torch.empty(0))
    expected.backward()
    body = theirs[0].auto_model
    wanted = {name: p.grad.clone() for name, p in body.named_parameters() if p.grad is not None}
    theirs.zero_grad()
    loss, result = ours(body, texts, options, theirs.tokenizer, 3)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    assert furthest(result, wanted) <= 1e-9
