"""Pretrained values by parameter name, read one at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from trainer.errors import ConfigError, Problem, refused
from trainer.models.spec import Weights
from trainer.storage import parse_json, read_file

SAMPLED = 1024
"""The number of values at each of a tensor's beginning, middle and end in its fingerprint."""


class SafetensorsFolder(Weights):
    """A folder of safetensors, memory-mapped: reading a tensor touches that tensor alone.

    A single file takes precedence over an index of several. Of an index, only the names of the
    files count: all tensors in them are read, and of two with the same name, the one in the last
    file. Transformers does the same. `renamed`: the names by which tensors are read -> those in the
    files, where they differ.
    """

    def __init__(
        self, folder: Path, stem: str = "model", renamed: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self.renamed = renamed or {}
        self._opened: dict[str, safe_open] = {}
        whole = f"{stem}.safetensors"
        index = folder / f"{stem}.safetensors.index.json"
        one = (folder / whole).is_file() or not index.is_file()
        self._file_of: dict[str, str] = {}
        for file in [whole] if one else indexed(index, ".safetensors"):
            self._file_of |= dict.fromkeys(self._file(file).keys(), file)

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> torch.Tensor | None:
        own = self.renamed.get(name, name)
        return self[own] if own in self._file_of else None

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape and dtype on the meta device; reads no values."""
        part = self._file(self._file_of[name]).get_slice(name)
        shape = part.get_shape()
        if part.get_dtype().startswith("F4"):  # two numbers in a byte, which torch does not read
            place = f"{self._folder / self._file_of[name]}: {name}"
            actual = f"a tensor of the type {part.get_dtype()}"
            hint = "Take the base in 16 bits"
            raise ConfigError(Problem(place, actual, "a type of a byte or more", hint))
        first = part[:0] if shape else self[name]
        return torch.empty(shape, dtype=first.dtype, device="meta")

    def release(self) -> None:
        self._opened = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file(self._file_of[name]).get_tensor(name)

    def _file(self, name: str) -> safe_open:
        """Open a file once: a mixture of experts has thousands of tensors in each."""
        if name not in self._opened:
            self._opened[name] = safe_open(self._folder / name, "pt")
        return self._opened[name]


def indexed(index: Path, ending: str) -> list[str]:
    """Return the names of the files in an index, sorted.

    Raises ConfigError unless each has this `ending` and is a plain name, without a folder.
    """
    expected = "a weight_map of names to files"
    kinds = (LookupError, TypeError, AttributeError)
    with refused(str(index), expected, OSError, ValueError, *kinds, named=True):
        files = sorted(set(map(str, parse_json(read_file(index))["weight_map"].values())))
    for name in files:
        if not re.fullmatch(rf"[^/\\]+{re.escape(ending)}", name):
            expected = f"names of {ending.lstrip('.')} files in this folder"
            raise ConfigError(Problem(str(index), repr(name), expected))
    return files


class Reads(Protocol):
    """Tensors by name."""

    def read(self, name: str) -> torch.Tensor | None: ...


def fingerprint(weights: Reads, names: Iterable[str]) -> str:
    """Return the SHA-256 of names, shapes, dtypes, and each tensor's first, middle and last values.

    It distinguishes bases without reading them whole. It does not show a change of values in
    between.
    """
    digest = hashlib.sha256()
    for name in names:
        if (value := weights.read(name)) is None:
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        flat = value.detach().reshape(-1)
        middle = max(0, (len(flat) - SAMPLED) // 2)
        for part in (flat[:SAMPLED], flat[middle : middle + SAMPLED], flat[-SAMPLED:]):
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
