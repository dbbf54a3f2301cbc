"""Pretrained values by parameter name, read one at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from trainer.errors import ConfigError, Problem


class SafetensorsFolder:
    """A folder of safetensors, memory-mapped: reading a tensor touches that tensor alone."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
            if strange := [name for name in self._file_of.values() if not re.fullmatch(r"[^/\\]+\.safetensors", name)]:
                raise ConfigError(Problem(str(index), repr(strange[0]), "names of safetensors files in this folder"))
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), "model.safetensors")
        self._folder = folder

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> torch.Tensor | None:
        if name not in self._file_of:
            return None
        with safe_open(self._folder / self._file_of[name], "pt") as file:
            return file.get_tensor(name)


class StateDict:
    """Values from a whole model in memory: for weights whose names are not the model's own."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values

    def read(self, name: str) -> torch.Tensor | None:
        return self._values.get(name)


def open_weights(
    folder: Path, needed: set[str], load_whole: Callable[[], dict[str, torch.Tensor]]
) -> SafetensorsFolder | StateDict:
    """Weights of `folder` for the parameters `needed`.

    Reads slice by slice when the files hold those very names; otherwise (old names, `.bin` files, merged
    experts) transformers itself converts them, which holds the model whole on every rank.
    Raises ConfigError when the folder has no weights.
    """
    if (folder / "model.safetensors.index.json").is_file() or (folder / "model.safetensors").is_file():
        direct = SafetensorsFolder(folder)
        if needed <= direct.names():
            return direct
    elif not any(folder.glob("*.bin")):
        raise ConfigError(
            Problem(
                f"trainer.model.name_or_path: {folder}",
                "no weights",
                "model.safetensors, model.safetensors.index.json or pytorch_model.bin",
                "Give the architecture alone as trainer.model.config to train from scratch",
            )
        )
    return StateDict(load_whole())
