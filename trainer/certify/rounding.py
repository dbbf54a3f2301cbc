"""A check of low precision for errors that the rounding of one step hides: over many sequences, at
the weights after training.

Rounding has no direction: over many sequences, the gradient's coefficient of projection on the
float32 gradient is 1, whatever the noise. And sums in float32 are exact: the gradient of a step is
the sum of its micro-batches' gradients, each computed while the targets of all others are ignored.
Each micro-batch's share of all targets is a power of two, by which a product is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from trainer.certify.tiny_run import LONGEST, Tiny
from trainer.engines import Engine, Job
from trainer.engines.engine import Observer
from trainer.optim.lr_schedules import Update
from trainer.tasks.task import IGNORED, Batch

STEPS = 16
"""The number of steps whose gradients are projected."""
FEWEST = 8
"""The fewest targets of a micro-batch, where sums are checked; others have twice as many."""

Tensors = dict[str, torch.Tensor]
Rows = list[tuple[np.ndarray, np.ndarray]]
"""The inputs and targets of each sequence, both [tokens]."""


class Rounded(NamedTuple):
    """The rounding of a run in low precision."""

    projected: list[Tensors]
    """The gradients of STEPS steps."""
    added: float = 0.0
    """The largest relative difference of a step's gradient from the sum of its micro-batches'."""
    where: str = ""
    """The parameter with that difference."""
    allowed: float = 0.0
    """The difference allowed if gradients are summed in low precision; 0: that of TOLERANCES."""


def rows_of(small: Tiny, vocabulary: int, step: int, data_rank: int, number: int) -> Rows:
    """Draw the sequences of a micro-batch, LONGEST tokens each; all targets count."""
    rng = np.random.default_rng([1, step, data_rank, number])
    tokens = rng.integers(1, vocabulary, (small.layout.micro_batch, LONGEST + 1))
    return [(row[:-1], row[1:]) for row in tokens]


def recording_into(gradients: Tensors) -> Observer:
    """Return an observer that keeps copies of gradients, on the host."""

    def keep(name: str, gradient: torch.Tensor) -> None:
        gradients[name] = gradient.detach().cpu().clone()

    return keep


def measured(engine: Engine, small: Tiny, kind: str, step: int) -> Rounded:
    """Measure an engine's rounding in steps from `step` on, at a learning rate of 0. Collective.

    `kind` is the engine's name.
    """
    job = engine.job
    layout = small.layout
    vocabulary = job.spec.language.vocabulary

    def gradients(number: int, batches: list[Batch]) -> Tensors:
        own: Tensors = {}
        engine.step(number, batches, Update(0.0), recording_into(own))
        return own

    def batches_of(number: int, targets: Callable[[int, int], int | None]) -> list[Batch]:
        rank = job.data_rank
        batches = []
        for i in range(layout.accumulation):
            rows = rows_of(small, vocabulary, number, rank, i)
            batches.append(_batch(job, rows, targets(rank, i), small.packed))
        return batches

    projected = [gradients(step + n, batches_of(step + n, lambda *_: None)) for n in range(STEPS)]
    places = [(rank, i) for rank in range(layout.data_ranks) for i in range(layout.accumulation)]
    apart = [[place] for place in places]
    if layout.expert > 1:  # experts compute the tokens of all ranks in one product, rounded once
        apart = [[p for p in places if p[1] == i] for i in range(layout.accumulation)]
    shares = _shares(len(apart))
    pairs = zip(apart, shares, strict=True)
    count = {place: share for some, share in pairs for place in some}
    whole = gradients(step, batches_of(step, lambda *place: count[place]))
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in whole.items()}
    for some in apart:
        alone = dict.fromkeys(places, 0) | {place: count[place] for place in some}
        part = gradients(step, batches_of(step, lambda *place, of=alone: of[place]))
        for name, value in part.items():
            total[name] += value.double() * (sum(alone.values()) / sum(count.values()))
    errors = {}
    for name, value in total.items():
        if value.numel():
            largest = max(float(value.abs().max()), 1e-30)
            errors[name] = float((whole[name] - value).abs().max()) / largest
    worst = max(errors, key=lambda name: errors[name])
    return Rounded(projected, errors[worst], worst, _allowed(small, kind))


def _allowed(small: Tiny, engine: str) -> float:
    """Return the error allowed: DeepSpeed sums in low precision, unless two keys say float32.

    The other engines sum in float32, unless one of these keys says "bf16".
    """
    settings = small.config.settings
    layout = small.layout
    accumulated = settings.get("data_types", {}).get("grad_accum_dtype")
    kinds = [accumulated, settings.get("communication_data_type")]
    if engine != "deepspeed":
        kinds = [kind for kind in kinds if kind == "bf16"]
    if all(kind == "fp32" for kind in kinds):
        return 0.0
    eps = torch.finfo(getattr(torch, layout.precision)).eps
    return layout.accumulation * layout.data_ranks * eps / 2


def _shares(count: int) -> list[int]:
    """Return the targets of each of `count` micro-batches: their sum divided by a power of two."""
    full = 1 << (count.bit_length() - 1)
    halves = 2 * (count - full)
    return [FEWEST] * halves + [2 * FEWEST] * (count - halves)


def _batch(job: Job, rows: Rows, kept: int | None, packed: bool) -> Batch:
    """Collate sequences with all targets, or only with `kept` targets of the first sequence."""
    samples = []
    for number, (inputs, targets) in enumerate(rows):
        counted = len(targets)
        if kept is not None:
            counted = kept if number == 0 else 0
        targets = np.where(np.arange(len(targets)) < counted, targets, IGNORED)
        sample = {"input_ids": inputs, "targets": targets}
        samples.append(sample | ({"documents": [len(inputs)]} if packed else {}))
    batch = job.task.collate(samples)
    return {name: value.to(job.machine.device) for name, value in batch.items()}


def coefficients(own: list[Tensors], theirs: list[Tensors]) -> tuple[list[float], float]:
    """Return each step's coefficient of projection on `theirs`, g.r / r.r, and the residuals' norm.

    The norm is over all steps, relative to that of `theirs`.
    """
    parts = []
    left = 0.0
    whole = 0.0
    for ours, exact in zip(own, theirs, strict=True):
        names = sorted(ours.keys() & exact.keys())
        g, r = (torch.cat([of[n].double().flatten() for n in names]) for of in (ours, exact))
        parts.append(float(g @ r / (r @ r)))
        left = left + float((g - parts[-1] * r).norm()) ** 2
        whole = whole + float(r.norm()) ** 2
    return parts, (left / whole) ** 0.5
