"""Checks, on a few samples, that a user's own module can be trained on any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from trainer.errors import ConfigError, Problem
from trainer.models.materialise import on_host
from trainer.models.names import gradients_of, pattern_of
from trainer.models.own.module import LARGEST_BUILT, running_norms
from trainer.models.own.python_state import snapshot
from trainer.models.spec import ModelSpec
from trainer.trial.findings import Findings, observe, observe_draws, say_unused
from trainer.trial.forward_state import Run, check_forward_state
from trainer.trial.setup import Alone, Batch, own_randomness


class OwnTask(Protocol):
    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor: ...
    def count(self, model: nn.Module, batch: Batch) -> int: ...


def check_module(spec: ModelSpec, task: OwnTask) -> Findings:
    """Try the module on a few samples: its loss, blocks, gradients, random numbers and state.

    Raises ConfigError for a loss that is not finite, or whose number of targets depends on the
    module's output, and for random numbers that no other layout could replay.
    """
    assert spec.tiny.input is not None
    if spec.parameters > LARGEST_BUILT:
        return Findings(notes=(f"{spec.name} is too large to be tried before it is trained",))
    with own_randomness(), Alone():
        whole, *single = spec.tiny.input.batches
        model = on_host(spec).train()
        together = _check_loss(model, spec, task, whole)
        norms = running_norms(model)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        model.eval()  # batch norm can't train on one sample
        passes = [together, *(_with_gradient(model, task, batch)[1] for batch in single)]
        never, sometimes = _without_gradient(names, passes)
        draws = observe_draws(model, spec)
        ran = observe(model.eval(), spec)[2]
        in_order = tuple(name for name in ran if name in spec.blocks) == spec.blocks
        del model
        halves = _halves(whole)
        run: Run = lambda model, rows: task.loss_sum(model, halves[rows])  # noqa: E731
        loss = ("loss", getattr(task, "_loss", None))
        moved = check_forward_state(spec.name, lambda: on_host(spec), run, loss)
    notes = list(say_unused(spec, never))
    if spec.blocks and not in_order:
        blocks = f"the blocks of {spec.name} do not run once each, in order"
        notes.append(f"{blocks}: layouts that need blocks are refused")
    statistics = {f"{name}.{key}" for name, norm in norms.items() for key in norm._buffers}
    moves = next((name for name in moved if name not in statistics), "")
    normalises = next(iter(norms), "")
    return Findings(never, sometimes, draws, in_order, moves, normalises, notes=tuple(notes))


def _check_loss(model: nn.Module, spec: ModelSpec, task: OwnTask, batch: Batch) -> set[str]:
    """Return the parameters that get a gradient, by name. Raises ConfigError for a wrong loss."""
    try:
        loss, found = _with_gradient(model, task, batch)
    except RuntimeError as error:
        for place, value in snapshot(model).items():
            if "without values" in value:
                stray = f"{place} is a tensor that is neither a parameter nor a buffer"
                expected = "a buffer (register_buffer)"
                problem = Problem("model", f"{stray}, and gets no values", expected)
                raise ConfigError(problem) from error
        raise
    place = f"loss: {spec.name}"
    if not math.isfinite(loss):
        raise ConfigError(Problem(place, f"{loss} on the first samples", "a finite number"))
    count, expected_count = task.count(model, batch), int(batch["count"])
    if count != expected_count:
        seen = f"{count} targets where an output of zeros gives {expected_count}"
        raise ConfigError(Problem(place, seen, "a count that depends on the target alone"))
    return found


def _without_gradient(
    names: Sequence[str], passes: Sequence[set[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return patterns of the parameters that get a gradient in no pass, and in some passes only."""
    anywhere, everywhere = set.union(*passes), set.intersection(*passes)
    never = tuple(dict.fromkeys(pattern_of(name) for name in names if name not in anywhere))
    sometimes = {pattern_of(name) for name in names if name not in everywhere}
    return never, tuple(sorted(sometimes - set(never)))


def _halves(batch: Batch) -> list[Batch]:
    """Return the first and the last two rows of a batch: batch norm can't train on one row."""
    size = max((len(value) for value in batch.values() if value.ndim), default=0)
    rows = {key for key, value in batch.items() if value.ndim and len(value) == size}
    first, last = slice(min(2, size)), slice(max(0, size - 2), size)
    halves = ({key: batch[key][part].clone() for key in rows} for part in (first, last))
    return [batch | half for half in halves]


def _with_gradient(model: nn.Module, task: OwnTask, batch: Batch) -> tuple[float, set[str]]:
    """Return the loss of a batch, and the names of the parameters that get a gradient from it."""
    model.zero_grad()
    loss = task.loss_sum(model, batch)
    if not loss.requires_grad:
        expected = "a sum that gradients can be taken of"
        raise ConfigError(Problem("loss", "depends on no parameter", expected))
    loss.backward()
    gradients = gradients_of(model)
    for name, gradient in gradients.items():
        if gradient.is_sparse:
            seen = f"{name} has a sparse gradient"
            mend = "Leave sparse=True out of nn.Embedding: the gradients are the same."
            raise ConfigError(Problem("model", seen, "dense ones", mend))
    return float(loss.detach()), set(gradients)
