"""The state that a model keeps between passes: its tensors, and values in its modules' attributes.

What is kept elsewhere (in closures, globals, objects, generators) shows where it changes an output.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from torch import nn

MOST_ENTRIES = 1000
"""The most entries of a list that are compared: a longer one is data."""
DEEPEST = 4
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}


def snapshot(model: nn.Module) -> dict[str, str]:
    """Return the state by place: tensors and arrays as checksums, all else as text."""
    result: dict[str, str] = {}
    for name, module in model.named_modules():
        attributes = {key: v for key, v in vars(module).items() if key not in _OF_MODULES}
        for key, value in {**module._parameters, **module._buffers, **attributes}.items():
            result |= dict(_leaves(f"{name}.{key}".lstrip("."), value))
    return result


def _leaves(place: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the comparable values in a value, with the place of each."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield place, checksum(value)
    elif isinstance(value, PLAIN):
        yield place, repr(value)
    elif isinstance(value, Mapping | list | tuple | deque) and depth < DEEPEST:
        yield f"{place} (its length)", str(len(value))
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in islice(parts, MOST_ENTRIES):
            yield from _leaves(f"{place}[{key!r:.40}]", part, depth + 1)


def checksum(value: torch.Tensor | np.ndarray) -> str:
    """Return text that is the same for the same values, bit for bit."""
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype}, {list(value.shape)}"
        if value.is_meta or value.layout != torch.strided:
            return f"a tensor ({kind}, without values)"
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"a tensor ({kind}, {zlib.crc32(flat.data):x})"
    data = np.zeros(0, np.uint8)
    if not value.dtype.hasobject:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"an array ({value.dtype}, {list(value.shape)}, {zlib.crc32(data.data):x})"
