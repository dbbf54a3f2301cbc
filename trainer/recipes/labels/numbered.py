"""Labels as numbers: which class each name is, or what a row's numbers are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from trainer.data.sources.formats import short
from trainer.errors import DataError, Problem, listed
from trainer.recipes.labels.kinds import Name
from trainer.recipes.labels.rows import Label
from trainer.tasks.task import IGNORED

MOST_CLASSES = 100_000
Stored = int | float | list[int] | np.ndarray
"""A label as it is stored: a class, the classes of tokens, one value for each class, a margin."""


class Numbering:
    """The classes of labels, or how many numbers one is."""

    def __init__(self, kind: Name, names: Sequence[str] = (), count: int = 0) -> None:
        """`names`: those of classes, in order; `count`: 0 until labels have been seen."""
        self.kind = kind
        self.names = tuple(names)
        self.count = len(names) or (1 if kind == "reward" else count)

    def learn(self, labels: Iterable[tuple[str, Label]]) -> None:
        """Learn classes, or the count of numbers, from all labels, each with its place.

        Raises DataError for a label of another kind than the first.
        """
        if self.kind == "reward" or self.names:
            return
        if self.kind == "regression":
            self._learn_width(labels)
            return
        largest = -1
        names: set[str] = set()
        width = 0
        for place, label in labels:
            if self.kind == "multi" and _is_hot(label):
                width = max(width, len(label))
                continue
            for one in label if isinstance(label, list) else [label]:
                if isinstance(one, str):
                    names.add(one)
                elif one is not None and int(one) == one:
                    largest = max(largest, int(one))
                if names and largest >= 0:
                    actual = f"{short(repr(one))}, and names in other rows"
                    raise DataError(Problem(place, actual, "names alone, or numbers alone"))
        self.names = tuple(sorted(names))
        self.count = max(len(names), largest + 1, width)
        if self.kind != "multi":
            self.count = max(self.count, 2)

    def _learn_width(self, labels: Iterable[tuple[str, Label]]) -> None:
        for _, label in labels:
            self.count = len(label) if isinstance(label, list) else 1
            return

    def number(self, place: str, label: Label) -> Any:
        """Return the label as it is stored. Raises DataError."""
        return self._numbering()(place, label)

    def _numbering(self) -> Callable[[str, Label], Stored]:
        known: dict[Name, Callable[[str, Label], Stored]] = {
            "single": self._class,
            "tokens": self._classes,
            "multi": self._set,
            "regression": self._numbers,
            "reward": self._margin,
        }
        return known[self.kind]

    def _class(self, place: str, label: Label) -> int:
        if isinstance(label, str):
            if label in self.names:
                return self.names.index(label)
            actual = f"the label {short(repr(label))}"
            raise DataError(Problem(place, actual, f"one of {listed(self.names or ['numbers'])}"))
        fits = isinstance(label, bool | int | float) and int(label) == label
        if not fits or not 0 <= int(label) < self.count:
            actual = f"the label {short(repr(label))}"
            hint = 'Set trainer.labels.kind="regression" for numbers that are no classes'
            expected = f"the number of a class, from 0 to {self.count - 1}"
            raise DataError(Problem(place, actual, expected, hint))
        return int(label)

    def _classes(self, place: str, labels: Label) -> list[int]:
        free = (None, IGNORED)
        return [IGNORED if one in free else self._class(place, one) for one in labels]

    def _set(self, place: str, label: Label) -> np.ndarray:
        row = np.zeros(self.count, np.float32)
        if _is_hot(label):
            if len(label) != self.count or not {*label} <= {0.0, 1.0}:
                actual = f"the labels {short(repr(label))}"
                expected = f"a 0.0 or 1.0 for each of {self.count} classes"
                raise DataError(Problem(place, actual, expected))
            return row + np.array(label, np.float32)
        for one in label if isinstance(label, list) else [label]:
            row[self._class(place, one)] = 1.0
        return row

    def _numbers(self, place: str, label: Label) -> np.ndarray:
        values = label if isinstance(label, list) else [label]
        numbers = [one for one in values if type(one) in (int, float) and math.isfinite(one)]
        if len(numbers) != len(values) or len(values) != self.count:
            actual = f"the label {short(repr(label))}"
            count = "a finite number" if self.count == 1 else f"{self.count} finite numbers"
            raise DataError(Problem(place, actual, count))
        return np.array(numbers, np.float32)

    def _margin(self, place: str, margin: Any) -> float:
        if not math.isfinite(margin):
            raise DataError(Problem(place, f"the margin {margin}", "a finite number"))
        return float(margin)


def _is_hot(label: Label) -> bool:
    """Return True for a number for each class, which JSON writes as 0.0 or 1.0."""
    return isinstance(label, list) and bool(label) and all(type(one) is float for one in label)
