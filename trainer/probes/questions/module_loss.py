"""Is the loss of your own module a finite sum, and which of its parameters get a gradient?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from trainer.errors import ConfigError, Problem
from trainer.models.names import gradients_of, pattern_of
from trainer.models.own.module import running_norms
from trainer.models.spec import ModelSpec
from trainer.probes.dispatch_modes import Alone
from trainer.probes.findings import notes_on_unused
from trainer.probes.inputs import Batch, ProbeTask
from trainer.probes.kept_state import snapshot
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import OWN


class OwnTask(ProbeTask, Protocol):
    def count(self, model: nn.Module, batch: Batch) -> int: ...
    def targets(self, batch: Batch) -> torch.Tensor: ...


@Alone()
def _ask(about: Probed) -> None:
    """Train on the first samples together, and evaluate on each one.

    Raises ConfigError for a loss that is not finite, or whose number of targets depends on the
    module's output.
    """
    spec, model = about.tiny
    assert spec.tiny.input is not None
    whole, *single = spec.tiny.input.batches
    together = _check_loss(model.train(), spec, about.task, whole)  # type: ignore[arg-type]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    normalises = next(iter(running_norms(model)), "")
    model.eval()  # batch norm can't train on one sample
    passes = [together, *(_with_gradient(model, about.task, batch)[1] for batch in single)]
    never, sometimes = _without_gradient(names, passes)
    notes = notes_on_unused(spec, never)
    about.learn(*notes, unused=never, sparse=sometimes, normalises=normalises)


def _check_loss(model: nn.Module, spec: ModelSpec, task: OwnTask, batch: Batch) -> set[str]:
    """Return the parameters that get a gradient, by name. Raises ConfigError for a wrong loss."""
    try:
        loss, gradients = _with_gradient(model, task, batch)
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
    count = task.count(model, batch)
    expected_count = int(task.targets(batch))
    if count != expected_count:
        actual = f"{count} targets where an output of zeros gives {expected_count}"
        raise ConfigError(Problem(place, actual, "a count that depends on the target alone"))
    return gradients


def _without_gradient(
    names: Sequence[str], passes: Sequence[set[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return patterns of the parameters that get a gradient in no pass, and in some passes only."""
    anywhere = set.union(*passes)
    everywhere = set.intersection(*passes)
    never = tuple(dict.fromkeys(pattern_of(name) for name in names if name not in anywhere))
    sometimes = {pattern_of(name) for name in names if name not in everywhere}
    return never, tuple(sorted(sometimes - set(never)))


def _with_gradient(model: nn.Module, task: ProbeTask, batch: Batch) -> tuple[float, set[str]]:
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
            actual = f"{name} has a sparse gradient"
            hint = "Leave sparse=True out of nn.Embedding: the gradients are the same."
            raise ConfigError(Problem("model", actual, "dense ones", hint))
    return float(loss.detach()), set(gradients)


QUESTION = Question(
    name="whether its loss is a finite sum",
    key="loss",
    need=OWN,
    ask=_ask,
    holds=(
        "The loss on the first samples is finite, its count of targets does not depend on the "
        "output, and every parameter gets a dense gradient"
    ),
    otherwise=(
        "error, with the value of the loss; parameters that get no gradient are listed and frozen"
    ),
    cost="a step",
)
