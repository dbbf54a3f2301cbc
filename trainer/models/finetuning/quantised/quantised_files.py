"""A quantised base in an adapter's folder, and its values where they are asked for again.

The file beside the adapter has the keys of transformers' `BitsAndBytesConfig`, which opens the base
so: `BitsAndBytesConfig.from_dict(json.load(open(".../quantization_config.json")))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.config.sections.adapter import QuantizeSection
from trainer.errors import ConfigError, Problem, listed, show
from trainer.models.door import object_in
from trainer.models.finetuning.lora_weights import BaseWeights, MergedWeights, base_name
from trainer.models.finetuning.quantised.format import WeightFormat
from trainer.models.finetuning.quantised.int8 import Int8
from trainer.models.finetuning.quantised.nf4 import NF4
from trainer.models.finetuning.quantised.quantised_base import Form, quantised_weights
from trainer.models.finetuning.quantised.quantised_experts import quantised
from trainer.models.spec import ModelSpec, Weights
from trainer.storage import to_json

FILE = "quantization_config.json"
EXPERTS = "quantised_experts"
"""The key of the modules of experts that are quantised, too: bitsandbytes leaves them."""
_FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
_NOT_WITH_EIGHT = {"load_in_4bit": False, "llm_int8_has_fp16_weight": False}
"""Keys that may not be true beside eight bits."""
_DOUBLE = "bnb_4bit_use_double_quant"


class QuantisedLayers(NamedTuple):
    """The part of an adapter's base that is quantised."""

    options: QuantizeSection
    layers: frozenset[str]
    """The modules of the base whose weights are quantised: linear layers, and experts."""

    @classmethod
    def of(cls, model: nn.Module, options: QuantizeSection | None) -> QuantisedLayers | None:
        """Return what is quantised of a model with adapters; None without `options`."""
        if options is None:
            return None
        names = (base_name(name).rpartition(".")[0] for name in quantised_weights(model))
        return cls(options, frozenset(names))

    def renamed(self, name: Callable[[str], str]) -> QuantisedLayers:
        """Return the same layers under other names."""
        return self._replace(layers=frozenset(map(name, self.layers)))


def write(folder: Path, quantised: QuantisedLayers | None, base: Callable[[], nn.Module]) -> None:
    """Write the file into an adapter's folder, if its base is quantised.

    `base` builds the model that the adapter is opened on, whose other layers the file names.
    """
    if quantised is None:
        return
    linear = [n for n, m in base().named_modules() if type(m) in (nn.Linear, Conv1D)]
    stated: dict[str, object] = dict(_EIGHT)
    if quantised.options.type == "nf4":
        stated = {**_FOUR, _DOUBLE: quantised.options.double_quant}
    stated["llm_int8_skip_modules"] = [name for name in linear if name not in quantised.layers]
    if stacks := sorted(quantised.layers.difference(linear)):
        stated[EXPERTS] = stacks
    (folder / FILE).write_bytes(to_json(stated))


def read(folder: Path) -> QuantizeSection | None:
    """Return how the base of an adapter's folder was quantised; None if it was not.

    Raises ConfigError for another kind of quantisation.
    """
    if not (folder / FILE).is_file():
        return None
    content = object_in(folder / FILE)
    if content.get("load_in_8bit"):
        _check(folder, content, {**_EIGHT, **_NOT_WITH_EIGHT})
        return QuantizeSection(type="int8")
    double = content.get(_DOUBLE, False)
    _check(folder, content, {**_FOUR, _DOUBLE: bool(double)})
    return QuantizeSection(double_quant=double)


def _check(folder: Path, content: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise ConfigError unless a file has these values; a key that it leaves out is False."""
    odd = []
    for key, value in expected.items():
        own = content.get(key, False)
        if type(own) is not type(value) or own != value:  # 1 is not true
            odd.append(key)
    if odd:
        actual = listed([f"{key} {show(content.get(key))}" for key in odd])
        raise ConfigError(Problem(str(folder / FILE), actual, "nf4 or int8 of bitsandbytes"))


def format_of(options: QuantizeSection) -> WeightFormat:
    """Return the format in which a base is kept."""
    return Int8() if options.type == "int8" else NF4(options.double_quant)


def name_of(options: QuantizeSection | None) -> str:
    """Name how a base is kept."""
    return "in 16 bits or more" if options is None else f"in {format_of(options).name}"


def layers_of(spec: ModelSpec, options: QuantizeSection) -> dict[str, Form]:
    """Return the quantised weights of a model with adapters, by their names in the base.

    `spec`: the model with the adapters, whose base is in 16 bits.
    """
    return forms_in(quantised(spec.build(), spec.blocks, format_of(options)))


def forms_in(model: nn.Module) -> dict[str, Form]:
    """Return the forms of a model's quantised weights, by their names in the base."""
    return {base_name(name): weight.form for name, weight in quantised_weights(model).items()}


class DequantisedWeights(Weights):
    """Weights of a base, those that are quantised as they are once dequantised, in float32."""

    def __init__(self, base: Weights, layers: Mapping[str, Form]) -> None:
        self._base = base
        self._layers = layers

    def read(self, name: str) -> torch.Tensor | None:
        value = self._base.read(name)
        if value is None or (layer := self._layers.get(name)) is None:
            return value
        return layer.dequantised(layer.stored(value), torch.float32)

    def release(self) -> None:
        self._base.release()


def dequantised(spec: ModelSpec, layers: Mapping[str, Form]) -> ModelSpec:
    """Return a model with adapters, or with them merged, on the dequantised base."""
    weights = spec.building.weights
    assert isinstance(weights, BaseWeights | MergedWeights)
    return spec.with_weights(weights.on(DequantisedWeights(weights.base, layers)))
