"""A check, on a tiny copy of a model, that packed documents do not see one another."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.errors import ConfigError, Problem, named_line
from trainer.models.spec import ModelSpec
from trainer.trial.draws import observe_draws
from trainer.trial.setup import (
    IGNORED,
    LENGTH,
    TOLERANCE,
    TrialTask,
    differing_gradient,
    own_randomness,
    tiny,
)

ROWS = ((9, LENGTH), (1, 5, 13, 2))
"""The lengths of the documents in each row; the rows differ in length, so that one is padded."""


class TokenTask(TrialTask, Protocol):
    def logits(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor: ...


def check_isolation(spec: ModelSpec, task: Any) -> None:
    """Raise ConfigError, with the numbers, unless packed documents have the logits and gradients of
    each one alone.

    Gradients are compared in training mode unless the model draws random numbers. Leaves the
    generators as they were.
    """
    if spec.language.own_loss:
        seen = (
            "the router's loss (output_router_logits) is a product of means over all that "
            "share "
            "a micro-batch"
        )
        raise _refused(spec, seen, "output_router_logits false")
    with own_randomness():
        try:
            small, model = tiny(spec)
            draws = observe_draws(copy.deepcopy(model), small)
            packed = task.prepare(copy.deepcopy(model))
            wrong = _compare_logits(packed.eval(), model.eval(), small, task)
            if not wrong:
                wrong = _compare_gradients(
                    packed.train(not draws.any), model.train(not draws.any), small, task
                )
        except ConfigError:
            raise
        except Exception as error:  # whatever a model's own code raises about documents
            wrong = f"packed documents can't be tried: {named_line(error, 300)}"
    if wrong:
        raise _refused(
            spec,
            f"on a tiny copy of it: {wrong}",
            "documents of one sample that do not see one another",
        )


def packed_batch(spec: ModelSpec, task: Any) -> dict[str, torch.Tensor]:
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


def _compare_logits(packed: nn.Module, alone: nn.Module, spec: ModelSpec, task: TokenTask) -> str:
    """Return the worst difference of logits between packed documents and each alone, or an empty
    string.
    """
    with torch.no_grad():
        together = task.logits(packed, packed_batch(spec, task)).float()
        worst, where = 0.0, ""
        for row, documents in zip(together, _documents(spec), strict=True):
            parts = row.split(
                [
                    *(len(ids) for ids, _ in documents),
                    len(row) - sum(len(ids) for ids, _ in documents),
                ]
            )
            for number, ((ids, _), mine) in enumerate(zip(documents, parts, strict=False)):
                theirs = alone(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0].float()
                moved = (mine - theirs).abs().amax(-1).nan_to_num(torch.inf)
                if (error := float(moved.max())) > worst:
                    worst, where = (
                        error,
                        f"token {int(moved.argmax())} of document {number + 1} of {len(documents)}",
                    )
        spread = float(together[0].std(0).max())
    if worst <= TOLERANCE * spread:
        return ""
    return (
        f"{where} in a row has other logits than alone, by {worst:.1e}; their spread is "
        f"{spread:.1e}"
    )


def _compare_gradients(
    packed: nn.Module, alone: nn.Module, spec: ModelSpec, task: TokenTask
) -> str:
    """Return the first difference of gradients between packed documents and each alone, or an empty
    string.
    """
    task.loss_sum(packed, packed_batch(spec, task)).backward()
    for ids, targets in (document for row in _documents(spec) for document in row):
        logits = alone(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0].float()
        F.cross_entropy(
            logits, torch.tensor(targets), reduction="sum", ignore_index=IGNORED
        ).backward()
    found = differing_gradient(packed, alone)
    if not found:
        return ""
    return (
        f"the gradient of {found[0]} from packed documents is off by {found[1]:.1%} of its "
        "largest entry"
    )


def _refused(spec: ModelSpec, actual: str, expected: str) -> ConfigError:
    return ConfigError(
        Problem(f"trainer.data.documents: {spec.name}", actual, expected, 'Set it to "pad".')
    )
