"""A check, on a tiny copy of a model, that packed documents do not attend to one another."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.errors import ConfigError, Problem, refused
from trainer.models.spec import ModelSpec
from trainer.trial import setup
from trainer.trial.findings import observe_draws
from trainer.trial.setup import IGNORED, LENGTH, TOLERANCE, Batch

ROWS = ((9, LENGTH), (1, 5, 13, 2))
"""The lengths of the documents in each row; the rows differ in length, so that one is padded."""


def check_isolation(spec: ModelSpec, task: Any) -> None:
    """Raise ConfigError unless packed documents have the logits and gradients of each one alone.

    Gradients are compared in training mode unless the model draws random numbers. Leaves the
    generators as they were.
    """
    place, mend = f"trainer.data.documents: {spec.name}", 'Set it to "pad".'
    if spec.language.own_loss:
        loss = "the router's loss (output_router_logits)"
        seen = f"{loss} is a product of means over all that share a micro-batch"
        raise ConfigError(Problem(place, seen, "output_router_logits false", mend))
    expected = "documents of one sample that do not see one another"
    start = "on a tiny copy of it: "
    untried = f"{start}packed documents can't be tried: "
    # whatever a model's own code raises about documents
    tried = refused(place, expected, named=True, start=untried, hint=mend)
    with setup.own_randomness(), tried:
        small, model = setup.tiny(spec)
        draws = observe_draws(copy.deepcopy(model), small)
        packed = task.prepare(copy.deepcopy(model))
        wrong = _compare_logits(packed.eval(), model.eval(), small, task)
        if not wrong:
            packed.train(not draws.any)
            model.train(not draws.any)
            wrong = _compare_gradients(packed, model, small, task)
        if wrong:
            raise ConfigError(Problem(place, f"{start}{wrong}", expected, mend))


def packed_batch(spec: ModelSpec, task: Any) -> Batch:
    """Collate two rows of several documents each, for a task on tokens."""
    samples = []
    for row in _documents(spec):
        inputs, targets = (np.concatenate(part) for part in zip(*row, strict=True))
        lengths = np.array([len(ids) for ids, _ in row])
        samples.append({"input_ids": inputs, "targets": targets, "documents": lengths})
    return task.collate(samples)  # type: ignore[no-any-return]


def _documents(spec: ModelSpec) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Draw inputs and targets of each document of each row; its last token has no target."""
    rng = np.random.default_rng(3)
    rows = [[rng.integers(1, spec.language.vocabulary, length) for length in row] for row in ROWS]
    return [[(ids, np.append(ids[1:], IGNORED)) for ids in row] for row in rows]


def _compare_logits(packed: nn.Module, alone: nn.Module, spec: ModelSpec, task: Any) -> str:
    """Return how packed documents' logits differ most from those of each alone; else nothing."""
    with torch.no_grad():
        together = task.logits(packed, packed_batch(spec, task)).float()
        worst, where = 0.0, ""
        for row, documents in zip(together, _documents(spec), strict=True):
            start = 0
            for number, (ids, _) in enumerate(documents, 1):
                own = row[start : start + len(ids)]
                start += len(ids)
                moved = (own - _logits(alone, ids)).abs().amax(-1).nan_to_num(torch.inf)
                if (error := float(moved.max())) > worst:
                    token = int(moved.argmax())
                    worst, where = error, f"token {token} of document {number} of {len(documents)}"
        spread = float(together[0].std(0).max())
    if worst <= TOLERANCE * spread:
        return ""
    difference = f"{where} in a sequence has logits that differ from those alone by {worst:.1e}"
    return f"{difference}; their spread is {spread:.1e}"


def _logits(model: nn.Module, ids: np.ndarray) -> torch.Tensor:
    """Return the logits of a document alone: [tokens, vocabulary]."""
    logits: torch.Tensor = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits
    return logits[0].float()


def _compare_gradients(packed: nn.Module, alone: nn.Module, spec: ModelSpec, task: Any) -> str:
    """Return the first gradient of packed documents that differs from each alone; else nothing."""
    task.loss_sum(packed, packed_batch(spec, task)).backward()
    for ids, targets in (document for row in _documents(spec) for document in row):
        labels = torch.tensor(targets)
        loss = F.cross_entropy(_logits(alone, ids), labels, reduction="sum", ignore_index=IGNORED)
        loss.backward()
    if not (found := setup.differing_gradient(packed, alone)):
        return ""
    gradient = f"the gradient of {found[0]} from packed documents"
    return f"{gradient} is off by {found[1]:.1%} of its largest entry"
