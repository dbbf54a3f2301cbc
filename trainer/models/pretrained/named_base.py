"""A base that a config names: its folder, its weights, and how it is saved again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trainer.errors import refused
from trainer.models.door import BUILD_MEMORY, BUILD_SECONDS, bounded, opening
from trainer.models.language.model_config import pretrained_config
from trainer.models.names import aliases_of, in_short
from trainer.models.patches import correct_prefix
from trainer.models.pretrained import config_json, quantised
from trainer.models.pretrained.files import stored_tensors
from trainer.models.pretrained.reader import ConvertedWeights
from trainer.models.pretrained.whole import MODEL_FILES, WholeBase, class_named

if TYPE_CHECKING:
    from trainer.config.sections.model_and_data import ModelSection

OTHER_FORMATS = ["*/*.safetensors", "consolidated*.safetensors"]
"""The patterns of files in which hub repositories have the weights again, for other libraries."""


@dataclass(frozen=True)
class NamedBase:
    """The base that a config names: its folder, and its config as transformers reads it."""

    name: str
    folder: Path
    config: PreTrainedConfig
    """The config as transformers reads it. Building a model changes a config: give it a copy."""

    @classmethod
    def opened(cls, options: ModelSection) -> NamedBase:
        """Open `trainer.model.name_or_path`, downloaded if it is on the hub.

        Raises ConfigError if it has no config that transformers opens.
        """
        assert options.name_or_path is not None
        return cls(options.name_or_path, folder_of(options), pretrained_config(options))

    @property
    def place(self) -> str:
        return f"trainer.model.name_or_path: {self.name}"

    def weights(self, model: PreTrainedModel) -> ConvertedWeights:
        """Open the weights for a model on the meta device.

        Raises ConfigError if there are none, or if they are stored in a way that cannot be read.
        """
        quantiser = quantised.dequantiser(quantised.stored_config(self.config), self.place)
        stored = stored_tensors(self.folder, self.config)
        return ConvertedWeights(stored, model, quantiser, self.place)

    def whole(
        self, weights: ConvertedWeights, model: PreTrainedModel, stated: list[str]
    ) -> WholeBase:
        """Return the folder as it is to be saved again; `stated`: the classes in its config.

        Raises ConfigError if something of it would be lost.
        """
        kind = class_named(stated) or type(model)
        build = None
        in_part = config_json.path_to_part(self.config, type(model.config))
        if in_part and not issubclass(type(model), kind):
            build = partial(self._build, kind, model.config.tie_word_embeddings)
        return WholeBase(self.folder, weights, model, self.config, build)

    def _build(self, kind: type[PreTrainedModel], tied: bool) -> PreTrainedModel:
        config = copy.deepcopy(self.config)
        quantised.remove_config(config)
        if not tied:
            untie(config)
        with (
            opening(f"trainer.model: {self.name}", "the class that it names"),
            bounded(BUILD_MEMORY, BUILD_SECONDS),
            torch.device("meta"),
        ):
            built = kind(config)
        correct_prefix(built)
        return built


def folder_of(options: ModelSection) -> Path:
    """Return the folder of a base, downloaded if it is on the hub.

    Raises ConfigError if it can't be downloaded.
    """
    folder = Path(options.name_or_path or "")
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, options.name_or_path, revision=options.revision)
    patterns = [*MODEL_FILES, "*.safetensors"]
    place = f"trainer.model.name_or_path: {options.name_or_path}"
    with refused(place, "a folder, or a model of the hub that can be downloaded", named=True):
        folder = Path(download(allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
        if not any(folder.glob("*.safetensors")):
            download(allow_patterns=["pytorch_model*.bin"])
    return folder


def untied(model: PreTrainedModel, weights: ConvertedWeights) -> str:
    """Return a tied tensor that the files have twice, with different values; empty if none."""
    stored = weights.names()
    for alias, first in aliases_of(model).items():
        if {alias, first} <= stored and not _same(weights.read(alias), weights.read(first)):
            return alias
    return ""


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.shape == other.shape and torch.equal(one.to(dtype), other.to(dtype))


def base_notes(
    weights: ConvertedWeights, model: PreTrainedModel, name: str, base: WholeBase | None
) -> Iterator[str]:
    """Yield notes on how a base is stored, and on tensors that are saved differently or not at all.

    `base`: the base's folder as it is saved again; None if the model alone is saved.
    """
    if method := weights.quantised_by:
        how = f"{name} is quantised by {method}: its values are dequantised as they are read"
        yield f"{how}; what is saved is not quantised, and has no quantization_config"
    kind = type(model).__name__
    strangers = weights.strangers()
    others = sorted(weights.unread.keys() - set(strangers))
    kept = "are left out"
    if base is not None:
        kept = "are not trained: their values are saved as they are"
        if other := base.renamed:
            shown = in_short(other, weights.stored.names() - {*other})
            saved = "are saved under the names and in the shapes that transformers gives them"
            yield f"{len(other)} tensors of {name} {saved}, which it alone reads: {shown}"
    for keys, result in ((strangers, kept), (others, "are left out")):
        if keys:
            shown = in_short(keys, model.state_dict().keys())
            yield f"{len(keys)} tensors of {name} have no place in a {kind} and {result}: {shown}"


def untie(config: PreTrainedConfig) -> None:
    """Change a config, in place, so that its models do not tie the head to the input embedding."""
    for part in (config, config.get_text_config(decoder=True)):
        part.update({"tie_word_embeddings": False})
