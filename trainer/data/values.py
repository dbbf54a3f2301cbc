"""Digests of samples by their values, which are the same in every process.

A pickle's bytes are not: they depend on which objects are shared and on how a tensor is stored.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

DEEPEST = 50
"""The levels of containers and objects that are looked into."""
REREADS = 8
"""How often samples are read again if this draws random numbers: a flip that happens half of the
time may give the same sample twice."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)
_AS_TEXT = (torch.dtype, torch.device, torch.layout, np.dtype, PurePath, range, slice)
_NAMED = (type, FunctionType, BuiltinFunctionType)


class ValueHash:
    """Hashes values: tensors and arrays by dtype, shape and bytes, all else by its parts."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()
        """The types of values that could not be taken apart: they count by their type alone."""
        self._known: dict[int, tuple[object, bytes]] = {}

    def of(self, value: object, depth: int = 0) -> bytes:
        """Return the SHA-256 of a value."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if id(value) in self._known and kind not in PLAIN:  # of a circle, only its type
            return self._known[id(value)][1]
        plain = hashlib.sha256(name.encode())
        self._known[id(value)] = value, plain.digest()  # which keeps the object, and so its id
        hashing = plain.copy()
        try:
            if depth > DEEPEST:
                raise ValueError("nested too deeply")
            for part in self._parts(value, depth):
                whole = part if type(part) is bytes else self.of(part, depth + 1)
                hashing.update(len(whole).to_bytes(8, "big") + whole)
        except Exception:  # whatever a foreign object raises when it is taken apart
            self.unknown.add(name)
            return plain.digest()
        self._known[id(value)] = value, hashing.digest()
        return hashing.digest()

    def _parts(self, value: object, depth: int) -> Iterator[object]:
        """Yield the parts of a value, and bytes where there are none."""
        if type(value) is bytes:
            yield value
        elif type(value) in PLAIN:
            yield repr(value).encode("utf-8", "backslashreplace")
        elif isinstance(value, Enum):
            yield value.name.encode()
        elif isinstance(value, _AS_TEXT):
            yield str(value).encode("utf-8", "backslashreplace")
        elif isinstance(value, _NAMED):
            yield f"{value.__module__}.{value.__qualname__}".encode()
        elif isinstance(value, (bytearray, memoryview)):
            yield bytes(value)
        elif isinstance(value, torch.Tensor):
            yield from _of_tensor(value)
        elif isinstance(value, (np.ndarray, np.generic)):
            yield from _of_array(value)
        elif isinstance(value, Mapping):
            yield from sorted(self.of(pair, depth + 1) for pair in value.items())
        elif isinstance(value, (set, frozenset)):
            yield from sorted(self.of(one, depth + 1) for one in value)
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield from _of_object(value)


def _of_tensor(value: torch.Tensor) -> Iterator[object]:
    value = value.detach().cpu()
    yield f"{value.dtype} {value.layout}".encode()
    if value.is_nested:
        yield from value.unbind()
        return
    yield str(list(value.shape)).encode()
    if value.layout != torch.strided:
        value = value.to_sparse_coo().coalesce()
        yield value.indices()
        yield value.values()
        return
    value = value.dequantize() if value.is_quantized else value.resolve_conj().resolve_neg()
    yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _of_array(value: np.ndarray | np.generic) -> Iterator[object]:
    if isinstance(value, np.ma.MaskedArray):
        yield np.ma.getmaskarray(value)
        value = value.filled(0)
    value = np.asarray(value)
    yield f"{value.dtype.descr} {value.shape}".encode()
    if value.dtype.hasobject:
        yield from value.ravel().tolist()
    else:
        yield value.tobytes()


def _of_object(value: object) -> Iterator[object]:
    """Yield what a pickle would hold of an object, before it is written as bytes."""
    reduced: Any = value.__reduce_ex__(2)
    if isinstance(reduced, str):
        yield reduced.encode()
        return
    padded = [*reduced, None, None, None]  # what makes it, from what, its state, items, pairs
    yield from padded[:3]
    yield list(padded[3] or ())
    yield dict(padded[4] or ())


def digest_of_samples(
    read: Callable[[int], object], indices: Sequence[int], unknown: set[str]
) -> bytes | None:
    """Return the SHA-256 of some samples' values; None if they differ from reading to reading.

    The state of the random generators is as before. The types of values that count by their type
    alone are added to `unknown`.
    """

    def once() -> bytes:
        hashing = hashlib.sha256()
        for index in indices:
            own = ValueHash()  # a copy shows what only this object, at its address, has
            hashing.update(own.of(_duplicate(read(index))))
            unknown.update(own.unknown)
        return hashing.digest()

    with seeded() as draws:
        first = once()
        for number in range(1, REREADS if draws() else 2):
            _seed(number)
            if once() != first:
                return None
    return first


def _duplicate(value: object) -> object:
    with suppress(Exception):  # some objects refuse it
        return copy.deepcopy(value)
    return value


@contextmanager
def seeded() -> Iterator[Callable[[], bool]]:
    """Seed the generators of Python, NumPy and PyTorch, until the end; yield what returns True once
    they have been used."""

    def state() -> list[str]:
        arrays = np.random.get_state(legacy=True)
        return [str(random.getstate()), str(arrays), str(torch_state().tolist())]

    torch_state = torch.default_generator.get_state
    before = random.getstate(), np.random.get_state(), torch_state()
    _seed(0)
    known = state()
    try:
        yield lambda: state() != known
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
