"""The inputs on which tiny copies are run: tokens, micro-batches, packed documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from trainer.models.spec import ModelSpec, Trial
from trainer.probes.probe import Differs

IGNORED = -100
LENGTH = 20
"""The number of tokens in a sequence: more than two attention windows of the tiny copy."""
WIDER = LENGTH + 8
"""The number of tokens in a padded sequence."""
DOCUMENTS = ((9, LENGTH), (1, 5, 13, 2))
"""The lengths of the documents in each packed sequence, one of which is shorter and so padded."""

Batch = dict[str, torch.Tensor]


class ProbeTask(Protocol):
    """The part of a task that probes need: the model prepared for the loss, batches, the loss."""

    @property
    def whole_step(self) -> object: ...
    def prepare(self, model: nn.Module) -> nn.Module: ...
    def collate(self, samples: Sequence[Mapping[str, object]]) -> Batch: ...
    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor: ...


class TokenTask(ProbeTask, Protocol):
    """The task of a language model, which also gives logits: [sequences, tokens, vocabulary]."""

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor: ...


def sequence_of(spec: ModelSpec) -> torch.Tensor:
    """Draw the ids of one sequence, [LENGTH], none of them 0, which is the padding."""
    generator = torch.Generator().manual_seed(2)
    return 1 + torch.randint(spec.language.vocabulary - 1, (LENGTH,), generator=generator)


def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of sequences of tokens: [sequences, tokens, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def batches(spec: ModelSpec, task: ProbeTask) -> Iterator[Batch]:
    """Yield micro-batches: ragged sequences, one without a target; one sequence alone; no target.

    The last has sequences none of which has a target.
    """
    ids = np.asarray(sequence_of(spec))
    for lengths, silent in (((LENGTH, 3, 11, 7), {2}), ((LENGTH,), set[int]()), ((5, 9), {0, 1})):
        samples = []
        for number, length in enumerate(lengths):
            targets = np.full(length, IGNORED)
            if number not in silent:
                targets[:-1] = ids[1:length]  # labels are as long as the ids: none for the last
            samples.append({"input_ids": ids[:length], "targets": targets})
        batch = task.collate(samples)
        # the task's padding may be larger than the vocabulary
        yield {**batch, "input_ids": batch["input_ids"] % spec.language.vocabulary}


def packed_batch(spec: ModelSpec, task: ProbeTask) -> Batch:
    """Collate two sequences of several documents each, for a task on tokens."""
    samples = []
    for sequence in packed_documents(spec):
        inputs, targets = (np.concatenate(part) for part in zip(*sequence, strict=True))
        lengths = np.array([len(ids) for ids, _ in sequence])
        samples.append({"input_ids": inputs, "targets": targets, "documents": lengths})
    return task.collate(samples)


def packed_documents(spec: ModelSpec) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Draw inputs and targets of each document of each sequence; a last token has no target."""
    rng = np.random.default_rng(3)
    vocabulary = spec.language.vocabulary
    drawn = [[rng.integers(1, vocabulary, length) for length in lengths] for lengths in DOCUMENTS]
    return [[(ids, np.append(ids[1:], IGNORED)) for ids in sequence] for sequence in drawn]


def trial_of(spec: ModelSpec) -> Trial:
    """Return the input on which a model is tried: its own samples, or two sequences of tokens.

    Running a stage raises Differs for a hidden state that is not [batch, sequence, width].
    """
    return spec.tiny.input or _of_tokens(spec)


def first_batch(spec: ModelSpec, task: ProbeTask, packed: bool = False) -> Batch:
    """Return the micro-batch on which gradients are compared."""
    if spec.tiny.input is not None:
        return spec.tiny.input.batches[0]
    return packed_batch(spec, task) if packed else next(batches(spec, task))


def _of_tokens(spec: ModelSpec) -> Trial:
    ids = torch.arange(2 * 12).reshape(2, 12) % (spec.language.vocabulary - 1) + 1
    width = spec.language.hidden_size

    def hidden(stage: nn.Module) -> torch.Tensor:
        state: torch.Tensor = stage.base_model(input_ids=ids, use_cache=False)[0]  # type: ignore[operator]
        if tuple(state.shape) != (*ids.shape, width):
            actual = f"a block gives a hidden state of shape {list(state.shape)}"
            raise Differs(f"{actual}, and stages send [batch, sequence, {width}] alone")
        return state

    return Trial(lambda model: model(input_ids=ids, use_cache=False).logits, hidden)
