"""The evaluation of a model: held-out loss, and a sample of text for the user to read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.data.loader import Batching, evaluation_batches
from trainer.data.mixture import Source
from trainer.engines.engine import Engine
from trainer.errors import ConfigError
from trainer.tasks.generation import continued
from trainer.tasks.supervised import NUMBER
from trainer.tasks.task import IGNORED, Batch

FEW = 8
"""The number of tokens at the beginning of a text that a model continues."""


class HeldOut(NamedTuple):
    """The result over the targets of held-out samples."""

    loss: float
    """The mean loss, nats per target."""
    targets: int
    measures: dict[str, float]
    """The task's other measures, as shares of the targets."""

    def split(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the task's own measures, and a script's metrics: the sums over their numbers."""
        own = dict(self.measures)
        names = [name for name in own if name + NUMBER in own]
        return own, {name: own.pop(name) / (own.pop(name + NUMBER) or math.nan) for name in names}


def held_out_loss(engine: Engine, source: Source, samples: int, workers: int = 0) -> HeldOut:
    """Evaluate the first `samples` samples, loaded by so many processes. Collective."""
    task, machine = engine.job.task, engine.job.machine
    batching = Batching.of(engine.job.layout, machine.ranks.rank, machine.device, workers)

    def batches() -> Iterator[Batch]:
        for batch in evaluation_batches(source, task.collate, task.blank, batching, samples):
            machine.watch.moves()
            yield batch

    sums, targets = engine.evaluate(batches())
    loss, *measures = (sums / targets).tolist()
    return HeldOut(loss, int(targets), dict(zip(task.measures, measures, strict=True)))


def together(found: Sequence[HeldOut]) -> HeldOut:
    """Combine several results, weighted by their targets."""
    targets = sum(one.targets for one in found)

    def mean(values: Iterable[float]) -> float:
        return sum(v * one.targets for v, one in zip(values, found, strict=True)) / targets

    measures = {name: mean([one.measures[name] for one in found]) for name in found[0].measures}
    return HeldOut(mean([one.loss for one in found]), targets, measures)


def beginning(source: Source, most: int) -> list[int]:
    """Return the tokens before the first target: at least a few, and at most the last `most`."""
    sample = source[0]
    counted = np.flatnonzero(sample["targets"] != IGNORED)
    first = int(counted[0]) + 1 if len(counted) else 0
    return [int(token) for token in sample["input_ids"][: max(first, FEW)]][-max(most, 1) :]


def continuation(
    folder: Path, tokenizer: Any, prompt: str | list[int], tokens: int, trust: bool
) -> str:
    """Return how the model in `folder` continues `prompt`; `trust`: its own code may run."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    if not model.can_generate():
        return f"(no sample: {type(model).__name__} has no method to generate text)"
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            written = continued(model, tokenizer, prompt, tokens)
    except ConfigError as error:
        return f"(no sample: {error})"
    return str(tokenizer.decode(written, skip_special_tokens=True))
