"""A base in four bits in an adapter's folder, and its values where they are asked for again.

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
from trainer.models.finetuning.four_bits.four_bit_base import Form, weights_in_four_bits
from trainer.models.finetuning.four_bits.four_bit_experts import in_four_bits
from trainer.models.finetuning.lora_weights import BaseWeights, MergedWeights, base_name
from trainer.models.spec import ModelSpec, Weights
from trainer.storage import to_json

FILE = "quantization_config.json"
EXPERTS = "four_bit_experts"
"""The key of the modules of experts that are in four bits, too: bitsandbytes leaves them."""
_KIND = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_DOUBLE = "bnb_4bit_use_double_quant"


class BitsOfBase(NamedTuple):
    """The part of an adapter's base that is in four bits."""

    options: QuantizeSection
    layers: frozenset[str]
    """The modules of the base whose weights are in four bits: linear layers, and experts."""

    @classmethod
    def of(cls, model: nn.Module, options: QuantizeSection | None) -> BitsOfBase | None:
        """Return what is in four bits of a model with adapters; None without `options`."""
        if options is None:
            return None
        names = (base_name(name).rpartition(".")[0] for name in weights_in_four_bits(model))
        return cls(options, frozenset(names))

    def renamed(self, name: Callable[[str], str]) -> BitsOfBase:
        """Return the same layers under other names."""
        return self._replace(layers=frozenset(map(name, self.layers)))


def write(folder: Path, bits: BitsOfBase | None, base: Callable[[], nn.Module]) -> None:
    """Write the file into an adapter's folder, if its base is in four bits.

    `base` builds the model that the adapter is opened on, whose other layers the file names.
    """
    if bits is None:
        return
    linear = [n for n, m in base().named_modules() if type(m) in (nn.Linear, Conv1D)]
    skipped = [name for name in linear if name not in bits.layers]
    double = bits.options.double_quant
    stated = {**_KIND, _DOUBLE: double, "llm_int8_skip_modules": skipped}
    if stacks := sorted(bits.layers.difference(linear)):
        stated[EXPERTS] = stacks
    (folder / FILE).write_bytes(to_json(stated))


def read(folder: Path) -> QuantizeSection | None:
    """Return how the base of an adapter's folder was quantised; None if it was not.

    Raises ConfigError for another kind of quantisation.
    """
    if not (folder / FILE).is_file():
        return None
    content = object_in(folder / FILE)
    double = content.get(_DOUBLE, False)
    odd = [key for key, value in _KIND.items() if content.get(key) != value]
    if type(double) is not bool:
        odd.append(_DOUBLE)
    if odd:
        actual = listed([f"{key} {show(content.get(key))}" for key in odd])
        raise ConfigError(Problem(str(folder / FILE), actual, "nf4 of bitsandbytes"))
    return QuantizeSection(double_quant=double)


def name_of(options: QuantizeSection | None) -> str:
    """Name how a base is kept."""
    if options is None:
        return "in 16 bits or more"
    return "in four bits (nf4, double_quant)" if options.double_quant else "in four bits (nf4)"


def layers_of(spec: ModelSpec, options: QuantizeSection) -> dict[str, Form]:
    """Return the weights in four bits of a model with adapters, by their names in the base.

    `spec`: the model with the adapters, whose base is in 16 bits.
    """
    model = in_four_bits(spec.build(), spec.blocks, options.double_quant)
    return {base_name(name): weight.form for name, weight in weights_in_four_bits(model).items()}


class DequantisedWeights(Weights):
    """Weights of a base, those in four bits as they are once dequantised, in float32."""

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
    """Return a model with adapters, or with them merged, on the base that four bits make of it."""
    weights = spec.building.weights
    assert isinstance(weights, BaseWeights | MergedWeights)
    return spec.with_weights(weights.on(DequantisedWeights(weights.base, layers)))
