"""Pretrained values by parameter name, read one at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open

from trainer.errors import ConfigError, Problem, refused
from trainer.models.spec import Weights
from trainer.storage import REFUSED_PICKLE, parse_json, read_file

SAMPLED = 1024
"""The number of values at the beginning, middle and end of a tensor that its fingerprint covers."""


class SafetensorsFolder(Weights):
    """A folder of safetensors, memory-mapped: reading a tensor touches that tensor alone.

    `renamed`: the names in the files of tensors that are read under other names.
    """

    def __init__(
        self, folder: Path, stem: str = "model", renamed: Mapping[str, str] | None = None
    ) -> None:
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            expected, kinds = "a weight_map of names to files", (LookupError, TypeError)
            with refused(str(index), expected, OSError, ValueError, *kinds, named=True):
                self._file_of: dict[str, str] = dict(parse_json(read_file(index))["weight_map"])
            for name in map(str, self._file_of.values()):
                if not re.fullmatch(r"[^/\\]+\.safetensors", name):
                    expected = "names of safetensors files in this folder"
                    raise ConfigError(Problem(str(index), repr(name), expected))
        else:
            with safe_open(folder / f"{stem}.safetensors", "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), f"{stem}.safetensors")
        self._folder, self._renamed = folder, renamed or {}

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> torch.Tensor | None:
        own = self._renamed.get(name, name)
        return self[own] if own in self._file_of else None

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._folder / self._file_of[name], "pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]


class StateDict(Weights):
    """Values of a whole model in memory: for weights whose names differ from the model's own."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values

    def read(self, name: str) -> torch.Tensor | None:
        return self._values.get(name)

    def release(self) -> None:
        self._values = {}


def fingerprint(weights: Any, names: Iterable[str]) -> str:
    """Return the SHA-256 of names, shapes, dtypes, and each tensor's first, middle and last values.

    It distinguishes bases without reading them whole; it misses a single value changed by hand in
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


def names_in(folder: Path) -> set[str]:
    """Return the names of all tensors in a folder's safetensors; empty if it has none."""
    return SafetensorsFolder(folder).names() if any(folder.glob("model.safetensors*")) else set()


def open_weights(
    folder: Path, needed: set[str], load_whole: Callable[[], dict[str, torch.Tensor]]
) -> SafetensorsFolder | StateDict:
    """Open the weights of `folder` for the parameters `needed`.

    Reads tensor by tensor if the files hold those very names; otherwise (old names, `.bin` files,
    merged experts) transformers converts them, which holds the whole model in memory on every rank.
    Raises ConfigError if the folder has no weights.
    """
    place = f"trainer.model.name_or_path: {folder}"
    files = ("model.safetensors.index.json", "model.safetensors")
    if any((folder / name).is_file() for name in files):
        direct = SafetensorsFolder(folder)
        if needed <= direct.names():
            return direct
    elif not any(folder.glob("*.bin")):
        expected = "model.safetensors, model.safetensors.index.json or pytorch_model.bin"
        mend = "Give the architecture alone as trainer.model.config to train from scratch"
        raise ConfigError(Problem(place, "no weights", expected, mend))
    try:
        return StateDict(load_whole())
    except UnpicklingError as error:
        seen = f"weights in a file {REFUSED_PICKLE}"
        mend = "Have their author save them as safetensors"
        raise ConfigError(Problem(place, seen, "tensors alone", mend)) from error
