"""The conversion of tensors in a base's files to tensors of the model."""

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
    """The conversion of tensors in files to one or several tensors of the model."""

    first: str
    """The name of the model's tensor; of several, the first."""
    transform: Any = None
    """Transformers' converter; None: the value is read as it is stored."""
    sources: list[tuple[str, str | None]] = field(default_factory=list)
    """Tensors of the files, in natural order, each with the converter's pattern that it matches."""
    whole_blocks: tuple[int, int] | None = None
    """Rows and columns of the codes padded to whole blocks; None if they are not padded."""

    def pass_on(self) -> None:
        """Drop the converter: the value is then read as it is stored."""
        self.transform = None

    def fill_blocks(self, size: tuple[int, int] | None) -> None:
        """Pad the codes with zeros, when read, to this many rows and columns; None: not at all."""
        self.whole_blocks = size

    @property
    def weights(self) -> list[str]:
        """The sources that are weights or codes of them, not scales."""
        return [key for key, pattern in self.sources if pattern is None or not is_scale(pattern)]


def plan(
    keys: Iterable[str], model: PreTrainedModel, quantiser: HfQuantizer | None
) -> tuple[dict[str, Conversion], dict[str, str]]:
    """Return the conversions for a model, by the names of their first tensors.

    They follow transformers' own rules. `keys`: the names in the files; `quantiser`: transformers'
    own, or None. Also returns the names in the files that are not read -> those that they would
    have in the model.
    """
    like = model.state_dict()
    mapping = get_model_conversion_mapping(model, None, quantiser)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    planned: dict[str, Conversion] = {}
    unread: dict[str, str] = {}
    prefix = type(model).base_model_prefix  # that of the files: `correct_prefix` sets the model's
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
    """Return the tensors that transformers makes by a conversion, by name.

    `on_meta`: their shapes and dtypes alone. Raises ValueError if the first of them is not made,
    and whatever transformers raises.
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
    """Read a source; codes are padded with zeros to whole blocks."""
    value = read(key)
    if conversion.whole_blocks is None or key not in conversion.weights:
        return value
    padded = torch.zeros(conversion.whole_blocks, dtype=torch.uint8, device=value.device)
    padded[: value.shape[0], : value.shape[1]] = value.view(torch.uint8)
    return padded.view(value.dtype)


def targets_of(conversions: Iterable[Conversion]) -> dict[str, str]:
    """Map each tensor of the files to the model's tensor that it is read into; of several, one."""
    return {key: conversion.first for conversion in conversions for key, _ in conversion.sources}
