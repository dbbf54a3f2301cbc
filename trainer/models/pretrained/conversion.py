"""The way of one or several tensors of a base's files into the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Conversion:
    """The way from tensors of the files to one or several of the model."""

    first: str
    """The model's tensor; of several, the first."""
    transform: Any = None
    """Transformers' converter; None: the value as it is stored."""
    sources: list[tuple[str, str | None]] = field(default_factory=list)
    """Tensors of the files, in natural order, each with the pattern that it matches."""

    def pass_on(self) -> None:
        """Read the value as it is stored."""
        self.transform = None


def plan(
    keys: Iterable[str], model: PreTrainedModel, quantiser: Any
) -> tuple[dict[str, Conversion], dict[str, str]]:
    """Return the conversions of a model by their first tensors, by transformers' own rules.

    `keys`: the names in the files; `quantiser`: transformers' own, or None. The second result is
    the names that the model has no place for, and what they would be called in it.
    """
    like = model.state_dict()
    mapping = get_model_conversion_mapping(model, None, quantiser)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    planned: dict[str, Conversion] = {}
    unread: dict[str, str] = {}
    prefix = type(model).base_model_prefix  # that of the files, which `correct_prefix` leaves
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, like)
        if name not in like and key in like:  # it has the model's own name already
            name, pattern = rename_source_key(key, [], [], prefix, like)
        if name not in like:
            unread[key] = name
            continue
        transform = None if pattern is None else by_pattern[pattern]
        conversion = planned.setdefault(name, Conversion(name, transform))
        # of two tensors for one place, transformers takes the first
        if conversion.sources and conversion.transform is None:
            unread[key] = name
        else:
            conversion.sources.append((key, pattern))
    return planned, unread


def targets_of(conversions: Iterable[Conversion]) -> dict[str, str]:
    """Return the model's tensor that each tensor of the files is read into; of several, one."""
    return {key: conversion.first for conversion in conversions for key, _ in conversion.sources}
