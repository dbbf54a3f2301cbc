"""Metrics of an evaluation are scikit-learn's over all samples, whatever ranks have which."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from trainer.recipes.labels.kinds import KINDS, LabelKind, Regression
from trainer.tasks.task import IGNORED

ROWS = 60


def figures(
    kind: LabelKind, logits: torch.Tensor, batch: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Sum the measures of unequal parts, as ranks and micro-batches do, and divide them."""
    total = torch.zeros(len(kind.measures), dtype=torch.float64)
    for part in (slice(0, 7), slice(7, 8), slice(8, None)):
        own = {name: value[part] for name, value in batch.items()}
        total += kind.measured(logits[part], own).double()
    sums = (total / 17).tolist()
    return kind.figures(dict(zip(kind.measures, sums, strict=True)))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", ["single", "tokens"])
def test_of_classes(classes: int, name: str, rng: np.random.Generator) -> None:
    from sklearn import metrics

    shape = (ROWS, 5) if name == "tokens" else (ROWS,)
    logits = torch.from_numpy(rng.standard_normal((*shape, classes)).astype(np.float32))
    labels = rng.integers(0, classes, shape)
    labels[rng.random(shape) < 0.2] = IGNORED
    result = figures(KINDS[name](classes), logits, {"labels": torch.from_numpy(labels)})
    counted = labels != IGNORED
    expected = labels[counted]
    actual = logits.argmax(-1).numpy()[counted]
    assert result["accuracy"] == pytest.approx(metrics.accuracy_score(expected, actual))
    macro = metrics.f1_score(expected, actual, average="macro")
    assert result["f1_macro"] == pytest.approx(macro)
    matthews = metrics.matthews_corrcoef(expected, actual)
    assert result["matthews"] == pytest.approx(matthews)
    if classes == 2:
        assert result["f1"] == pytest.approx(metrics.f1_score(expected, actual))


def test_of_a_class_that_is_always_predicted(rng: np.random.Generator) -> None:
    """Matthews' is 0 there, and a class that occurs nowhere is not in the mean of F1."""
    from sklearn import metrics

    labels = rng.integers(0, 2, ROWS)
    logits = torch.zeros(ROWS, 3)
    logits[:, 1] = 1.0
    result = figures(KINDS["single"](3), logits, {"labels": torch.from_numpy(labels)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        macro = metrics.f1_score(labels, np.ones(ROWS, int), average="macro")
        assert result["matthews"] == metrics.matthews_corrcoef(labels, np.ones(ROWS, int)) == 0
    assert result["f1_macro"] == pytest.approx(macro)


def test_of_sets_of_classes(rng: np.random.Generator) -> None:
    from sklearn import metrics

    logits = rng.standard_normal((ROWS, 4)).astype(np.float32)
    labels = (rng.random((ROWS, 4)) < 0.4).astype(np.float32)
    labels[:20] = logits[:20] > 0  # some rows are all right
    tensors = {"labels": torch.from_numpy(labels), "counts": torch.ones(ROWS)}
    result = figures(KINDS["multi"](4), torch.from_numpy(logits), tensors)
    predicted = logits > 0
    assert result["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    for average in ("micro", "macro"):
        expected = metrics.f1_score(labels, predicted, average=average)
        assert result[f"f1_{average}"] == pytest.approx(expected)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_of_numbers(offset: float, rng: np.random.Generator) -> None:
    """Also far from 0, where sums of squares of the numbers themselves would have no digits."""
    from scipy.stats import pearsonr
    from sklearn import metrics

    labels = (rng.standard_normal((ROWS, 1)) + offset).astype(np.float32)
    logits = (labels + rng.standard_normal((ROWS, 1)) / 2).astype(np.float32)
    kind = Regression(1, [float(labels.mean())])
    tensors: dict[str, Any] = {"labels": torch.from_numpy(labels), "counts": torch.ones(ROWS)}
    result = figures(kind, torch.from_numpy(logits), tensors)
    flat = labels[:, 0].astype(np.float64), logits[:, 0].astype(np.float64)
    assert result["pearson"] == pytest.approx(pearsonr(*flat).statistic, rel=1e-5)
    assert result["r2"] == pytest.approx(metrics.r2_score(*flat), rel=1e-4)
    error = metrics.mean_absolute_error(*flat)
    assert result["absolute_error"] == pytest.approx(error, rel=1e-5)
