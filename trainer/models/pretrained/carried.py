"""The tensors of a base that the trained model has no place for, as they are saved again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.core_model_loading import rename_source_key

from trainer.models.pretrained.conversion import Conversion, converted
from trainer.models.pretrained.files import StoredTensors
from trainer.models.pretrained.quantised import (
    CODES,
    COMPANION,
    check_scaled,
    conversion_errors,
    is_code,
    is_scale,
)

if TYPE_CHECKING:
    from transformers.quantizers.base import HfQuantizer


class CarriedTensors:
    """Tensors of a base's files that are not trained: byte for byte, or the values of codes.

    What is saved is not quantised, so codes are dequantised by the base's own rule.
    """

    def __init__(
        self, stored: StoredTensors, names: Iterable[str], quantiser: HfQuantizer | None, place: str
    ) -> None:
        """Plan how the tensors `names` are read; `quantiser`: transformers', or None.

        Raises ConfigError for a tensor that can't be read or dequantised.
        """
        self._stored = stored
        self._place = place
        self._conversions: dict[str, Conversion] = {}
        converters = [] if quantiser is None else quantiser.get_weight_conversions()
        by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
        planned: dict[str, Conversion] = {}
        for key in names:
            name, pattern = rename_source_key(key, [], converters)
            transform = None if pattern is None else by_pattern[pattern]
            conversion = planned.setdefault(name, Conversion(name, transform))
            conversion.sources.append((key, pattern))
        for name, conversion in planned.items():
            if self._is_quantised(conversion):
                matched = [(key, pattern) for key, pattern in conversion.sources if pattern]
                conversion.fill_blocks(check_scaled(stored, matched, quantiser, place))
                self._conversions[name] = conversion
            else:
                keys = [key for key, _ in conversion.sources]
                self._conversions |= {key: Conversion(key, None, [(key, None)]) for key in keys}
        self._try()

    def __iter__(self) -> Iterator[str]:
        return iter(self._conversions)

    @property
    def codes(self) -> list[str]:
        """The tensors that would be saved as codes, as nothing dequantises them."""
        return [name for name in self if not self.is_dequantised(name) and self._is_code(name)]

    def is_dequantised(self, name: str) -> bool:
        """Return True for the values of codes, in float32; others are saved byte for byte."""
        return self._conversions[name].transform is not None

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape and dtype on the meta device."""
        conversion = self._conversions[name]
        like = self._stored.like(conversion.weights[0])
        return like.float() if self.is_dequantised(name) else like

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor as it is saved. Raises ConfigError if transformers can't dequantise it."""
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._stored[conversion.sources[0][0]]
        with conversion_errors(self._place, name):
            return converted(conversion, self._stored, _model_of(name))[name]

    def _is_quantised(self, conversion: Conversion) -> bool:
        """Return True for one tensor of codes (float8 or float4), with one scale."""
        scales = [pattern for _, pattern in conversion.sources if pattern and is_scale(pattern)]
        weights = conversion.weights
        if len(scales) != 1 or len(weights) != 1:
            return False
        return self._stored.like(weights[0]).dtype in CODES

    def _is_code(self, name: str) -> bool:
        return is_code(self.like(name)) or bool(COMPANION.search(name.rpartition(".")[2]))

    def _try(self) -> None:
        """Read all shapes and convert one tensor, so that errors come now and not when saving."""
        for name in self:
            self.like(name)
        if first := next(filter(self.is_dequantised, self), ""):
            self.read(first)


def _model_of(name: str) -> nn.Module:
    """Return a model with one float32 tensor: transformers looks up the dtype to convert to."""
    root = owner = nn.Module()
    *parents, leaf = name.split(".")
    for parent in parents:
        child = nn.Module()
        owner.add_module(parent, child)
        owner = child
    owner.register_parameter(leaf, nn.Parameter(torch.empty((), device="meta")))
    return root
