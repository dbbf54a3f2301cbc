"""The files that hold a base's weights, chosen in the order in which transformers chooses them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError

from trainer.errors import ConfigError, Problem, refused
from trainer.models.pretrained.weights import SafetensorsFolder, indexed
from trainer.storage import REFUSED_PICKLE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER = "adapter_config.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class StoredTensors(Protocol):
    """Tensors of files, by their names there; a shape and a dtype are known without the values."""

    def names(self) -> set[str]: ...

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape and dtype on the meta device."""

    def release(self) -> None:
        """Close the files. The next read opens them again."""


class PickledTensors:
    """The tensors of `pytorch_model.bin` files, memory-mapped where their format allows it.

    Nothing but tensors is unpickled. Raises ConfigError for a file with anything else.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._values: dict[str, torch.Tensor] = {}

    def names(self) -> set[str]:
        return set(self._opened())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._opened()[name]

    def like(self, name: str) -> torch.Tensor:
        return self[name].to("meta")

    def release(self) -> None:
        self._values = {}

    def _opened(self) -> dict[str, torch.Tensor]:
        for path in self._paths if not self._values else ():
            self._values.update(_unpickled(path))
        return self._values


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    kinds = (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError)
    with refused(str(path), "a file of tensors that torch.save wrote", *kinds):
        try:
            try:
                values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before PyTorch 1.6 can't be mapped
                values = torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            actual = f"weights in a file {REFUSED_PICKLE}"
            hint = "Have their author save them as safetensors"
            raise ConfigError(Problem(str(path), actual, "tensors alone", hint)) from error
        if not isinstance(values, dict) or not all(map(torch.is_tensor, values.values())):
            raise TypeError("no dictionary of tensors")
    return {str(name): value.detach() for name, value in values.items()}


def stored_tensors(folder: Path, config: PreTrainedConfig) -> StoredTensors:
    """Open the files with a folder's weights; `config`: that of the folder.

    One file comes before an index, and safetensors before pickles, as in transformers. Raises
    ConfigError if there are none, if the config names another file, or if an adapter is beside
    them.
    """
    place = f"trainer.model.name_or_path: {folder}"
    if (folder / ADAPTER).is_file():
        actual = "a model, and an adapter beside it that transformers would load on top"
        hint = f"Remove {ADAPTER}, or name a folder that the adapter was merged into"
        raise ConfigError(Problem(place, actual, "a model alone", hint))
    named = getattr(config, "transformers_weights", None)
    name = next((name for name in SAFETENSORS if (folder / name).is_file()), None)
    if named is not None and named != name:
        expected = f"weights in {name or ' or '.join(SAFETENSORS)}"
        hint = "Save the model by transformers' save_pretrained"
        raise ConfigError(Problem(place, f"transformers_weights {named!r:.100}", expected, hint))
    if name is not None:
        with refused(str(folder), "safetensors files", SafetensorError, OSError):
            return SafetensorsFolder(folder)
    whole, index = (folder / name for name in PICKLES)
    if whole.is_file():
        return PickledTensors([whole])
    if index.is_file():
        return PickledTensors(folder / name for name in indexed(index, ".bin"))
    expected = "model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    hint = "Give the architecture alone as trainer.model.config to train from scratch"
    raise ConfigError(Problem(place, "no weights", expected, hint))
