"""A head of its own over the body of a language model: a class for each sequence."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaModel

from sketches.sketch import WORDS, Last, Made, Sketch, tokens_of
from trainer.data.mixture import Source
from trainer.models.spec import ModelSpec
from trainer.tasks.supervised import Supervised

CLASSES = 3


class Classifier(nn.Module):
    """A Llama without its head, and a linear layer on the last token's hidden state."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        )  # fmt: skip
        self.body = LlamaModel(config)
        self.last = Last()
        self.score = nn.Linear(16, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores [batch, classes] of tokens [batch, sequence]."""
        length, device = tokens.shape[1], tokens.device
        # of four dimensions, so that transformers reads no values to make one
        mask = torch.full((length, length), -1e9, device=device).triu(1)[None, None]
        output = self.body(input_ids=tokens, attention_mask=mask, use_cache=False)
        return self.score(self.last(output.last_hidden_state))  # type: ignore[no-any-return]


def samples(count: int) -> Source:
    def labelled(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tokens_of(index)
        return tokens, tokens.sum() % CLASSES

    return Made(count, labelled)


def loss(scores: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, int]:
    return cross_entropy(scores.float(), classes, reduction="sum"), len(classes)


def task(spec: ModelSpec) -> Supervised:
    return Supervised(loss, spec.build, spec.blocks)


class HeadSketch(Sketch):
    build = Classifier
    samples = samples
    task = task
    blocks = "body.layers.*"


RECIPE = HeadSketch()
