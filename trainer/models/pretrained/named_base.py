"""A base that a config names: its folder, its weights, and how it is written again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trainer.models.door import BUILD_MEMORY, BUILD_SECONDS, bounded, opening
from trainer.models.language.model_config import pretrained_config
from trainer.models.names import aliases_of, in_short
from trainer.models.patches import correct_prefix
from trainer.models.pretrained import config_json, quantised
from trainer.models.pretrained.files import stored_tensors
from trainer.models.pretrained.reader import ConvertedWeights
from trainer.models.pretrained.whole import MODEL_FILES, WholeBase, class_named

OTHER_FORMATS = ["*/*.safetensors", "consolidated*.safetensors"]
"""The patterns of weights that hub repositories have a second time, for other libraries."""


def weights_of(model: PreTrainedModel, options: Any) -> ConvertedWeights:
    """Open the weights of the folder or hub id for a model on the meta device.

    Raises ConfigError if there are none, or if they are stored in a way that cannot be read.
    """
    place = f"trainer.model.name_or_path: {options.name_or_path}"
    config = pretrained_config(options)
    quantiser = quantised.dequantiser(quantised.stored_config(config), place)
    stored = stored_tensors(folder_of(options), config)
    return ConvertedWeights(stored, model, quantiser, place)


def folder_of(options: Any) -> Path:
    """Return the folder of a base, downloaded if it is on the hub."""
    folder = Path(options.name_or_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, options.name_or_path, revision=options.revision)
    patterns = [*MODEL_FILES, "*.safetensors"]
    folder = Path(download(allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
    if not any(folder.glob("*.safetensors")):
        download(allow_patterns=["pytorch_model*.bin"])
    return folder


def whole_base(
    weights: ConvertedWeights, model: PreTrainedModel, stated: list[str], options: Any
) -> WholeBase:
    """Return the base's folder as it is to be written again; `stated`: the classes that it names.

    Raises ConfigError if something of it would be lost.
    """
    kind = class_named(stated) or type(model)
    config = pretrained_config(options)
    place = config_json.path_to_part(config, type(model.config))

    def build() -> PreTrainedModel:
        whole = pretrained_config(options)
        quantised.remove_config(whole)
        if not model.config.tie_word_embeddings:
            untie(whole)
        with (
            opening(f"trainer.model: {options.name_or_path}", "the class that it names"),
            bounded(BUILD_MEMORY, BUILD_SECONDS),
            torch.device("meta"),
        ):
            built: PreTrainedModel = kind(whole)
        correct_prefix(built)
        return built

    is_part = bool(place) and not issubclass(type(model), kind)
    return WholeBase(folder_of(options), weights, model, config, build if is_part else None)


def untied(model: PreTrainedModel, weights: ConvertedWeights) -> str:
    """Return a tied tensor that the files have twice, with other values; empty if there is none."""
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
    """Yield notes on how a base is stored, and on tensors that come back otherwise or not at all.

    `base`: the folder as it is written again; None if the model alone is.
    """
    if method := weights.quantised_by:
        how = f"{name} is quantised by {method}: its values are dequantised as they are read"
        yield f"{how}; what is saved is not quantised, and has no quantization_config"
    kind = type(model).__name__
    strangers = weights.strangers()
    others = sorted(weights.unread.keys() - set(strangers))
    kept = "are left out"
    if base is not None:
        kept = "are not trained: they are saved as they are"
        if other := base.renamed:
            shown = in_short(other, weights.stored.names() - {*other})
            saved = "are saved under the names and in the shapes that transformers gives them"
            yield f"{len(other)} tensors of {name} {saved}, which it alone reads: {shown}"
    for keys, result in ((strangers, kept), (others, "are left out")):
        if keys:
            shown = in_short(keys, model.state_dict().keys())
            yield f"{len(keys)} tensors of {name} have no place in a {kind} and {result}: {shown}"


def untie(config: PreTrainedConfig) -> None:
    """Have the models of a config keep head and table apart; changes it in place."""
    for part in (config, config.get_text_config(decoder=True)):
        part.update({"tie_word_embeddings": False})
