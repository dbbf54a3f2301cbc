"""Is the task's loss that of the model's own `forward(labels=...)`?"""

from __future__ import annotations

import torch
from torch import nn

from trainer.distributed.seeding import seed_generators
from trainer.models.names import gradients_of
from trainer.models.spec import ModelSpec
from trainer.probes.inputs import IGNORED, LENGTH, Batch, ProbeTask, batches, sequence_of
from trainer.probes.probe import TOLERANCE, Finding, differing_gradient, probe
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import LANGUAGE


def _ask(about: Probed) -> Finding | None:
    """Compare loss and every gradient, in training, with the same random numbers."""
    task = about.task

    def compare(own: nn.Module, ours: nn.Module, small: ModelSpec) -> Finding | None:
        own.train()
        ours.train()
        shifts = _shifts_labels(own, small)
        for batch in batches(small, task):
            if not int((batch["targets"] != IGNORED).sum()):
                result = _without_targets(ours, task, batch)
            elif (loss := _own_loss(own, batch, shifts)) is None:
                about.learn(f"{small.name} has no loss of its own that ours could be compared with")
                return None
            else:
                result = _compare(own, ours, task, batch, loss)
            if result is not None:
                return result
            ours.zero_grad()
            own.zero_grad()
        return None

    return probe(about.spec, lambda model, small: task.prepare(model), compare, about.tiny)


def _own_loss(own: nn.Module, batch: Batch, shifts: bool) -> torch.Tensor | None:
    """Return the model's own mean loss, if it has one."""
    targets = batch["targets"]
    shifted = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], 1)
    labels = shifted if shifts else targets
    seed_generators(1)
    loss: torch.Tensor | None = own(
        input_ids=batch["input_ids"], labels=labels, use_cache=False
    ).loss
    return loss


def _compare(
    own: nn.Module, ours: nn.Module, task: ProbeTask, batch: Batch, loss: torch.Tensor
) -> Finding | None:
    """Compare with `loss`, the mean of the model's own, multiplied by the number of targets."""
    counted = int((batch["targets"] != IGNORED).sum())
    theirs = loss * counted
    theirs.backward()
    seed_generators(1)
    mine = task.loss_sum(ours, batch)
    mine.backward()
    error = abs(float(mine.detach() - theirs.detach()))
    if not error <= TOLERANCE * abs(float(theirs.detach())):
        expected = f"its own, {float(loss.detach()):.6g}"
        return _other(f"loss {float(mine.detach()) / counted:.6g}", expected)
    if result := differing_gradient(ours, own):
        name, share = result
        actual = f"the gradient of {name} is off by {share:.1%} of its largest entry"
        return _other(actual, "that of its own loss")
    return None


def _without_targets(ours: nn.Module, task: ProbeTask, batch: Batch) -> Finding | None:
    """Compare with nothing, for a micro-batch without a target, of which the own mean is NaN."""
    seed_generators(1)
    mine = task.loss_sum(ours, batch)
    mine.backward()
    gradients = gradients_of(ours).values()
    if bool(mine != 0) or any(bool((gradient != 0).any()) for gradient in gradients):
        return _other(f"{float(mine.detach()):g} without a target", "0, and no gradient")
    return None


def _shifts_labels(model: nn.Module, spec: ModelSpec) -> bool:
    """Return True if the model's own loss shifts labels, and ignores the first; BART's does not."""
    ids = sequence_of(spec)[None]
    labels = torch.where(torch.arange(LENGTH) > 0, IGNORED, ids)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    return loss is None or not bool(loss.isfinite())


def _other(actual: str, expected: str) -> Finding:
    unknown = "It adds what this trainer does not know (a router's loss, a scale)"
    hint = f"{unknown}; it is not trained without it."
    return Finding(f"on a tiny copy of it: {actual}", expected, hint)


QUESTION = Question(
    name="whether its loss is ours",
    key="trainer.model",
    need=LANGUAGE,
    ask=_ask,
    holds=(
        "The loss and every gradient are those of the model's own `forward(labels=...)`, in "
        "training, with the same random numbers, for ragged sequences and sequences without a "
        "target"
    ),
    otherwise="error, with the loss or the parameter and by how much",
    cost="0.05 s",
)
