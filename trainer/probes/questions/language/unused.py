"""Do all parameters get a gradient from text?"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from trainer.distributed.seeding import seed_generators
from trainer.models.names import gradients_of, pattern_of
from trainer.models.spec import ModelSpec
from trainer.probes.findings import notes_on_unused
from trainer.probes.inputs import IGNORED, LENGTH, Batch, ProbeTask, batches
from trainer.probes.probe import spread
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import LANGUAGE

SINGLE = 4
"""The number of sequences of one token, tried for parameters that they leave without a gradient."""
TRIES = 4
"""How often a parameter without a gradient is tried with other weights."""


def _ask(about: Probed) -> None:
    small, model = about.tiny
    never, sometimes = _unused(model, small, about.task)
    notes = notes_on_unused(about.spec, never)
    about.learn(*notes, unused=never, sparse=sometimes)


def _unused(
    model: nn.Module, spec: ModelSpec, task: ProbeTask
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return name patterns of parameters that nothing gives a gradient, and that some does not.

    Tried with single tokens and with short and long sequences; a parameter without a gradient then
    is tried with many more tokens and other weights, since a token may be routed to it.
    """
    ours = task.prepare(copy.deepcopy(model)).train()
    names = [name for name, p in ours.named_parameters() if p.requires_grad]
    with_gradient: set[str] = set()
    sometimes: dict[str, None] = {}
    for batch in (*_single_tokens(spec, task), *batches(spec, task)):
        if bool((batch["targets"] != IGNORED).any()):
            gradients = _with_gradient(ours, batch, task)
            sometimes |= dict.fromkeys(pattern_of(name) for name in names if name not in gradients)
            with_gradient |= {pattern_of(name) for name in gradients}
    for seed in range(TRIES):
        if with_gradient.issuperset(sometimes):
            break
        spread(ours, seed)
        drawing = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, spec.language.vocabulary, (16, LENGTH), generator=drawing)
        gradients = _with_gradient(ours, {"input_ids": tokens, "targets": tokens}, task)
        with_gradient |= {pattern_of(name) for name in gradients}
    never = tuple(name for name in sometimes if name not in with_gradient)
    return never, tuple(name for name in sometimes if name in with_gradient)


def _single_tokens(spec: ModelSpec, task: ProbeTask) -> Iterator[Batch]:
    for token in range(SINGLE):
        ids = [1 + token % (spec.language.vocabulary - 1)]
        yield task.collate([{"input_ids": ids, "targets": ids}])


def _with_gradient(model: nn.Module, batch: Batch, task: ProbeTask) -> set[str]:
    model.zero_grad()
    seed_generators(1)
    task.loss_sum(model, batch).backward()
    return set(gradients_of(model))


QUESTION = Question(
    name="which parameters have no gradient",
    key="trainer.model",
    need=LANGUAGE,
    ask=_ask,
    holds="Every parameter gets a gradient from text",
    otherwise=(
        "parameters that get none (a vision tower, cross-attention, an indexer) are listed and "
        "frozen: the optimizer does not decay them, and they are saved unchanged. Which ones short "
        "or long sequences or single tokens leave without a gradient is known to the engines: "
        "`mesh` and `accelerate` agree in each step on which gradients are missing; `deepspeed` "
        "does not support such a model, since it takes a missing gradient for zeros"
    ),
    cost="0.05 s",
)
