"""The state that Python code keeps outside the state dict: attributes, closures, generators, ..."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

LIBRARIES = {
    *("torch", "transformers", "torchvision", "numpy", "deepspeed", "accelerate", "peft"),
    "trainer",
}
"""Packages whose code is not the user's own; Python's own modules are not, either."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
KEPT = (*PLAIN, list, tuple, dict, set, FunctionType, type)
"""The types of globals that are looked at: an object of another type may be anything."""
LONGEST = 1000
"""The most entries of a list that are looked at: a longer one is data."""
DEEPEST = 8
_STREAMS = ("random", "itertools", "numpy.random", "builtins", "collections", "functools", "types")
"""The modules whose classes keep a position: generators and iterators."""
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}


def is_library(thing: Any) -> bool:
    """Return True if code belongs to Python, to one of LIBRARIES or to this program."""
    name = getattr(thing, "__module__", None) or getattr(thing, "__name__", "builtins")
    root = str(name).partition(".")[0]
    return root in LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")


def captured(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the outside values that a function uses: closure, defaults, attributes, globals."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield "defaults", (function.__defaults__, function.__kwdefaults__)
    yield from vars(function).items()
    names = dict.fromkeys(_names(function.__code__))
    known = function.__globals__
    for name, value in ((name, known[name]) for name in names if name in known):
        if isinstance(value, KEPT):
            yield name, value
        elif isinstance(value, ModuleType) and not is_library(value):  # `module.function` of it
            for key in names:
                if isinstance(part := vars(value).get(key, ...), KEPT):
                    yield f"{name}.{key}", part


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def snapshot(model: nn.Module, *beside: tuple[str, Any]) -> dict[str, Any]:
    """Return the state that a model keeps, by place: tensors as checksums, all else as text.

    Functions of the user's classes are included with what they capture, and so are the objects
    `beside` the model.
    """
    visited: dict[int, Any] = {id(module): module for module in model.modules()}
    result: dict[str, Any] = {}
    for name, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        state = {**tensors, **{key: v for key, v in vars(module).items() if key not in _OF_MODULES}}
        for key, value in state.items():
            result |= dict(leaves(f"{name}.{key}".lstrip("."), value, visited))
    classes = (kind for kind in dict.fromkeys(map(type, model.modules())) if not is_library(kind))
    for place, thing in (*((kind.__qualname__, dict(vars(kind))) for kind in classes), *beside):
        result |= dict(leaves(place, thing, visited))
    return result


def leaves(
    place: str, value: Any, visited: dict[int, Any], depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the comparable values in a value, each object once; `visited` keeps objects alive."""
    if (text := plain(value)) is not None:
        yield place, text
    elif id(value) not in visited and depth < DEEPEST:
        visited[id(value)] = value
        if isinstance(value, (list, tuple, dict, set, deque)):
            yield f"{place} (its length)", str(len(value))
        for name, part in parts_of(value):
            yield from leaves(f"{place}{name}", part, visited, depth + 1)


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that a value holds, each with its place in it."""
    kind = type(value)
    if isinstance(value, Mapping):
        yield from ((f"[{key!r:.40}]", part) for key, part in list(value.items())[:LONGEST])
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", part) for index, part in enumerate(islice(value, LONGEST)))
    elif isinstance(value, (set, frozenset)):
        yield "", repr(sorted(map(repr, list(value)[:LONGEST])))
    elif isinstance(value, nn.Module):  # kept where `modules()` does not find it
        own = ((key, part) for key, part in vars(value).items() if key not in _OF_MODULES)
        yield from ((f".{key}", part) for key, part in own)
        yield from ((f".{name}", tensor) for name, tensor in value.state_dict().items())
    elif isinstance(value, (MethodType, staticmethod, classmethod, property)):
        function = getattr(value, "__func__", None) or getattr(value, "fget", None)
        yield from (("", part) for part in (getattr(value, "__self__", None), function))
    elif isinstance(value, FunctionType):
        if not is_library(value):
            yield from ((f" {name}", part) for name, part in captured(value))
    elif isinstance(value, type):
        return
    elif not is_library(kind) and getattr(value, "__dict__", None):
        yield from ((f".{key}", part) for key, part in vars(value).items())
    elif not is_library(kind) or kind.__module__.startswith(_STREAMS):
        try:
            yield "", value.__reduce_ex__(2)[1:]
        except Exception:  # a lock, a file, a Python generator: its effect shows, if it has one
            return


def plain(value: Any) -> str | None:
    """Return a tensor, array, generator, number or string as text; None for what has parts."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return checksum(value)
    return repr(value) if isinstance(value, PLAIN) else None


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
