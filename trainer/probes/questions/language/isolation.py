"""Does each of several packed documents have the logits and gradients that it has alone?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.models.spec import ModelSpec
from trainer.probes.inputs import IGNORED, TokenTask, packed_batch, packed_documents
from trainer.probes.probe import TOLERANCE, Finding, differing_gradient, drawn, probe
from trainer.probes.question import Need, Probed, Question
from trainer.probes.questions.randomness import observe_draws


def _ask(about: Probed) -> Finding | None:
    """Compare logits, and gradients: in training mode unless the model draws random numbers."""
    if about.spec.language.own_loss:
        loss = "the router's loss (output_router_logits)"
        actual = f"{loss} is a product of means over all that share a micro-batch"
        return Finding(actual, "output_router_logits false")
    task: Any = about.task

    def compare(alone: nn.Module, packed: nn.Module, small: ModelSpec) -> Finding | None:
        trains = not observe_draws(drawn(small), small).any
        difference = _compare_logits(packed.eval(), alone.eval(), small, task)
        if not difference:
            difference = _compare_gradients(packed.train(trains), alone.train(trains), small, task)
        return Finding(f"on a tiny copy of it: {difference}") if difference else None

    return probe(about.spec, lambda model, small: task.prepare(model), compare)


def _compare_logits(packed: nn.Module, alone: nn.Module, spec: ModelSpec, task: TokenTask) -> str:
    """Return how packed documents' logits differ most from those of each alone; else nothing."""
    worst = 0.0
    where = ""
    with torch.no_grad():
        together = task.logits(packed, packed_batch(spec, task)).float()
        for sequence, documents in zip(together, packed_documents(spec), strict=True):
            start = 0
            for number, (ids, _) in enumerate(documents, 1):
                own = sequence[start : start + len(ids)]
                start += len(ids)
                moved = (own - _logits(alone, ids)).abs().amax(-1).nan_to_num(torch.inf)
                if (error := float(moved.max())) > worst:
                    token = int(moved.argmax())
                    worst = error
                    where = f"token {token} of document {number} of {len(documents)}"
        spread = float(together[0].std(0).max())
    if worst <= TOLERANCE * spread:
        return ""
    difference = f"{where} in a sequence has logits that differ from those alone by {worst:.1e}"
    return f"{difference}; their spread is {spread:.1e}"


def _logits(model: nn.Module, ids: np.ndarray) -> torch.Tensor:
    """Return the logits of a document alone: [tokens, vocabulary]."""
    logits: torch.Tensor = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits
    return logits[0].float()


def _compare_gradients(
    packed: nn.Module, alone: nn.Module, spec: ModelSpec, task: TokenTask
) -> str:
    """Return the first gradient of packed documents that differs from each alone; else nothing."""
    task.loss_sum(packed, packed_batch(spec, task)).backward()
    for ids, targets in (document for row in packed_documents(spec) for document in row):
        labels = torch.tensor(targets)
        loss = F.cross_entropy(_logits(alone, ids), labels, reduction="sum", ignore_index=IGNORED)
        loss.backward()
    if not (different := differing_gradient(packed, alone)):
        return ""
    gradient = f"the gradient of {different[0]} from packed documents"
    return f"{gradient} is off by {different[1]:.1%} of its largest entry"


QUESTION = Question(
    name="whether packed documents attend to one another",
    key="trainer.data.documents",
    expected="documents of one sample that do not attend to one another",
    hint='Set it to "pad".',
    need=Need(
        '`"documents": "pack"` or `"isolate"`',
        lambda about: about.packed,
        lambda about: about.under(packed=True) if about.is_language else None,
    ),
    ask=_ask,
    holds=(
        "If documents are packed or isolated, each has the logits and gradients that it has alone "
        "([docs/packing.md](packing.md))"
    ),
    otherwise=(
        "error, with the token and by how much: layers with state along a sequence that are not "
        "found or that return it (xLSTM), a router's loss"
    ),
    cost="0.1 s",
)
