"""The way of one or several tensors of a base's files into the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from trainer.models.pretrained.files import StoredTensors
from trainer.models.pretrained.quantised import is_scale

if TYPE_CHECKING:
    from transformers.quantizers.base import HfQuantizer


@dataclass
class Conversion:
    """The way from tensors of the files to one or several of the model."""

    first: str
    """The model's tensor; of several, the first."""
    transform: Any = None
    """Transformers' converter; None: the value as it is stored."""
    sources: list[tuple[str, str | None]] = field(default_factory=list)
    """Tensors of the files, in natural order, each with the pattern that it matches."""
    whole_blocks: tuple[int, int] | None = None
    """Rows and columns of codes in whole blocks, of which the tensor has fewer; None: as many."""

    def pass_on(self) -> None:
        """Read the value as it is stored."""
        self.transform = None

    def fill_blocks(self, size: tuple[int, int] | None) -> None:
        """Read the codes with zeros up to so many rows and columns; None: as they are stored."""
        self.whole_blocks = size

    @property
    def weights(self) -> list[str]:
        """The sources that are weights or codes of them, not scales."""
        return [key for key, pattern in self.sources if pattern is None or not is_scale(pattern)]


def plan(
    keys: Iterable[str], model: PreTrainedModel, quantiser: HfQuantizer | None
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


def converted(
    conversion: Conversion, stored: StoredTensors, model: nn.Module, on_meta: bool = False
) -> dict[str, torch.Tensor]:
    """Return the tensors that a conversion makes, by transformers; `on_meta`: of shapes alone.

    Raises ValueError if the first of them is not made, and what transformers raises.
    """
    first = conversion.first
    transform = deepcopy(conversion.transform)
    read = stored.like if on_meta else stored.__getitem__
    for key, pattern in conversion.sources:
        transform.add_tensor(first, key, pattern, partial(_in_whole_blocks, conversion, read, key))
    with torch.no_grad():
        made = transform.convert(first, model=model, config=getattr(model, "config", None))
    if first not in made:
        raise ValueError(f"made of it: {', '.join(map(str, made))}")
    values = {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
    if conversion.whole_blocks is not None:
        rows, columns = stored.like(conversion.weights[0]).shape
        values[first] = values[first][:rows, :columns].contiguous()
    return values


def _in_whole_blocks(
    conversion: Conversion, read: Callable[[str], torch.Tensor], key: str
) -> torch.Tensor:
    """Read a source; codes with zeros up to the end of the last blocks."""
    value = read(key)
    if conversion.whole_blocks is None or key not in conversion.weights:
        return value
    padded = torch.zeros(conversion.whole_blocks, dtype=torch.uint8, device=value.device)
    padded[: value.shape[0], : value.shape[1]] = value.view(torch.uint8)
    return padded.view(value.dtype)


def targets_of(conversions: Iterable[Conversion]) -> dict[str, str]:
    """Return the model's tensor that each tensor of the files is read into; of several, one."""
    return {key: conversion.first for conversion in conversions for key, _ in conversion.sources}
