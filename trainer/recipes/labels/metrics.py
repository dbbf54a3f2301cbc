"""Metrics by scikit-learn's definitions, from sums that are added over micro-batches and ranks.

All sums may be divided by one number: no metric depends on their scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from trainer.tasks.task import IGNORED

RIGHT = "right"
PREDICTED = "predicted"
LABELLED = "labelled"
OF_CLASSES = (RIGHT, PREDICTED, LABELLED)
NUMBERS = ("n", "x", "y", "xx", "yy", "xy", "absolute")


def names_of_classes(count: int) -> tuple[str, ...]:
    return tuple(f"{name}/{number}" for name in OF_CLASSES for number in range(count))


def count_classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count, for each class, the labels that are predicted right, predicted, and there.

    `logits` [targets, classes], `labels` [targets].
    """
    counted = labels != IGNORED
    classes = torch.arange(logits.shape[-1], device=logits.device)
    predicted = (logits.argmax(-1)[:, None] == classes) & counted[:, None]
    labelled = labels[:, None] == classes
    parts = (predicted & labelled, predicted, labelled)
    return torch.cat([part.sum(0) for part in parts]).float()


def of_classes(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' coefficient of targets with one class each.

    F1 is that of class 1 if there are two, beside the mean over the classes that are labelled or
    predicted. With s targets, c right ones, p_k predicted and t_k labelled as class k, Matthews'
    is (c s - sum p_k t_k) / sqrt((s^2 - sum p_k^2)(s^2 - sum t_k^2)), and 0 where that is 0 / 0.
    """
    right, predicted, labelled = _by_class(sums, count)
    whole = sum(labelled)
    scores = _f1_of_classes(right, predicted, labelled)
    known = [score for score, *there in zip(scores, predicted, labelled, strict=True) if any(there)]
    cross = math.fsum(p * t for p, t in zip(predicted, labelled, strict=True))
    spread = (whole**2 - math.fsum(p * p for p in predicted)) * (
        whole**2 - math.fsum(t * t for t in labelled)
    )
    level = sum(right) * whole - cross
    figures = {
        "accuracy": _ratio(sum(right), whole),
        "f1_macro": _ratio(math.fsum(known), len(known)),
        "matthews": level / math.sqrt(spread) if spread > 1e-12 * whole**4 else 0.0,
    }
    return figures | {"f1": scores[1]} if count == 2 else figures


def names_of_sets(count: int) -> tuple[str, ...]:
    return (*names_of_classes(count), "exact", "rows")


def count_sets(logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Count classes as `count_classes` does, and rows, and those whose classes are all right.

    A class is predicted if its logit is above 0. All but `counts` [rows]: [rows, classes].
    """
    predicted = (logits > 0).float() * counts[:, None]
    labelled = (labels > 0.5).float() * counts[:, None]
    exact = (predicted == labelled).all(1).float() * counts
    parts = ((predicted * labelled).sum(0), predicted.sum(0), labelled.sum(0))
    return torch.cat([*parts, torch.stack([exact.sum(), counts.sum()])])


def of_sets(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the share of rows that are all right, and F1 over all labels, and over classes."""
    right, predicted, labelled = _by_class(sums, count)
    scores = _f1_of_classes(right, predicted, labelled)
    return {
        "accuracy": _ratio(sums["exact"], sums["rows"]),
        "f1_micro": _ratio(2 * sum(right), sum(predicted) + sum(labelled)),
        "f1_macro": _ratio(math.fsum(scores), count),
    }


def names_of_numbers(count: int) -> tuple[str, ...]:
    return tuple(f"{name}/{number}" for name in NUMBERS for number in range(count))


def count_numbers(ours: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sum numbers, their products and the absolute errors; both [rows, outputs]."""
    weights = counts[:, None]
    x = ours * weights
    y = labels * weights
    n = torch.ones_like(x) * weights
    parts = (n, x, y, x * x, y * y, x * y, (x - y).abs())
    return torch.cat([part.sum(0) for part in parts])


def of_numbers(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the mean absolute error, R^2 and Pearson's r, each a mean over the outputs."""
    each: dict[str, list[float]] = {"absolute_error": [], "r2": [], "pearson": []}
    for number in range(count):
        n, x, y, xx, yy, xy, absolute = (sums[f"{name}/{number}"] for name in NUMBERS)
        of_x = xx - x * x / n
        of_y = yy - y * y / n
        each["absolute_error"].append(absolute / n)
        each["r2"].append(1 - _ratio(xx - 2 * xy + yy, of_y) if of_y > 0 else math.nan)
        spread = math.sqrt(max(of_x, 0.0) * max(of_y, 0.0))
        each["pearson"].append((xy - x * y / n) / spread if spread > 0 else math.nan)
    return {name: math.fsum(values) / count for name, values in each.items()}


def _by_class(sums: Mapping[str, float], count: int) -> list[list[float]]:
    return [[sums[f"{name}/{number}"] for number in range(count)] for name in OF_CLASSES]


def _f1_of_classes(
    right: list[float], predicted: list[float], labelled: list[float]
) -> list[float]:
    """Return F1 of each class: 2 right / (predicted + labelled), and 0 where that is 0 / 0."""
    each = zip(right, predicted, labelled, strict=True)
    return [_ratio(2 * hits, guesses + there) for hits, guesses, there in each]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
