"""The reverse of a conversion: a model's tensors under the names and shapes of the base's files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from trainer.models.pretrained.conversion import Conversion
from trainer.models.pretrained.files import StoredTensors
from trainer.state import FileTensor

LONGEST = 3
"""The most entries of a dimension when the order of bytes is found by a trial."""
_CODES = re.compile(r"(_packed|_blocks)$")
"""The endings of the patterns of codes, which names in a base in 16 bits do not have."""


def pieces_of(
    conversion: Conversion,
    likes: Mapping[str, torch.Tensor],
    stored: StoredTensors,
    model: PreTrainedModel,
) -> dict[str, tuple[FileTensor, ...]]:
    """Map each tensor that a conversion makes to those of the files that make up its bytes.

    They are in the order of the bytes. `likes`: the model's tensors, by name. Empty if the bytes of
    one are not those of whole tensors of the files, one after the other: where transformers
    permutes values, or divides a tensor.
    """
    orders = _in_order(conversion, stored, model)
    names = {key: _value_name(key, pattern) for key, pattern in conversion.sources}
    result = {}
    for name, keys in orders.items():
        like = likes[name]
        shapes = [tuple(stored.like(key).shape) for key in keys]
        if len(keys) == 1:
            shapes = [tuple(like.shape)]
        if sum(map(math.prod, shapes)) != like.numel():
            return {}
        named = zip(keys, shapes, strict=True)
        result[name] = tuple(FileTensor(names[key], shape) for key, shape in named)
    return result


def values_of(conversion: Conversion) -> list[str]:
    """Return the names that a conversion's sources, without scales, have in a base in 16 bits."""
    weights = conversion.weights
    return [_value_name(key, pattern) for key, pattern in conversion.sources if key in weights]


def _value_name(key: str, pattern: str | None) -> str:
    """Return the name in a base in 16 bits of a tensor that matches a converter's pattern."""
    return _CODES.sub("", key) if pattern and _CODES.search(pattern) else key


def _in_order(
    conversion: Conversion, stored: StoredTensors, model: PreTrainedModel
) -> dict[str, list[str]]:
    """Map each tensor made to its sources, in the order of their bytes; empty if they are mixed.

    Transformers converts small tensors in which every value is a different number. The places of
    these numbers in the result show the order.
    """
    weights = conversion.weights
    if conversion.transform is None:
        return {conversion.first: weights[:1]}
    steps = conversion.transform.operations
    steps = [deepcopy(step) for step in steps if not getattr(step, "hf_quantizer", None)]
    if not steps:
        return {conversion.first: weights} if len(weights) == 1 else {}
    patterns = conversion.transform.source_patterns, conversion.transform.target_patterns
    transform = WeightConverter(*map(list, patterns), operations=steps)
    numbers: dict[int, tuple[str, int]] = {}
    start = 0
    for key, pattern in conversion.sources:
        if key not in weights:
            continue
        shape = [min(size, LONGEST) for size in stored.like(key).shape]
        count = math.prod(shape)
        value = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        transform.add_tensor(conversion.first, key, pattern, partial(_itself, value))
        numbers[start] = (key, count)
        start += count
    try:
        made = transform.convert(conversion.first, model=model, config=model.config)
    except Exception:  # whatever an operation raises for a tensor of another size
        return {}
    orders = {}
    for name, value in made.items():
        flat = (value[0] if isinstance(value, list) else value).reshape(-1).int().tolist()
        orders[name] = _consecutive(flat, numbers)
    used = [key for keys in orders.values() for key in keys]
    whole = all(orders.values()) and sorted(used) == sorted(weights)
    return orders if whole else {}


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _consecutive(flat: list[int], numbers: dict[int, tuple[str, int]]) -> list[str]:
    """Return the keys whose runs of numbers a list consists of, in order; empty if one is broken.

    `numbers`: the first number of each run -> its key and length.
    """
    keys = []
    place = 0
    while place < len(flat):
        key, count = numbers.get(flat[place], ("", 0))
        if not count or flat[place : place + count] != list(
            range(flat[place], flat[place] + count)
        ):
            return []
        keys.append(key)
        place += count
    return keys
