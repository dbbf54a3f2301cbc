"""The weights of a base with an adapter around it, or merged into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.models.materialise import on_host
from trainer.models.names import tensors_of
from trainer.models.pretrained.weights import SafetensorsFolder
from trainer.models.spec import MadeWeights, ModelSpec, NoWeights, Weights

ADAPTER = "default"
"""PEFT's name for a single adapter, which its files leave out."""


def is_adapters(name: str) -> bool:
    """Return True if a parameter or module belongs to an adapter, not to the base or its copies."""
    return any(part.startswith("lora_") for part in name.split("."))


def base_name(name: str) -> str:
    """Return the name that a tensor of the base has without adapters around it."""
    for added in (".base_layer", f".modules_to_save.{ADAPTER}", ".original_module"):
        name = name.replace(added, "")
    return name


def adapted_weight(name: str, module: nn.Module) -> str:
    """Return the base's name of the weight that a module with an adapter changes.

    PEFT has one such module for each linear layer, and one for each stack of experts' matrices,
    around the module of experts.
    """
    return base_name(f"{name}.{getattr(module, 'parameter_name', 'weight')}")


def product(module: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return scaling x B A of an adapter's A and B: what it adds to a weight, or to a stack."""
    if hasattr(module, "parameter_name"):
        second, first = factors(module, first, second)
    return module.scaling[ADAPTER] * (second @ first)  # type: ignore[no-any-return]


def factors(
    module: Any, first: torch.Tensor, second: torch.Tensor, experts: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two stacks whose products, scaled, are what an adapter adds to `experts` of a stack.

    Of a stack of e matrices PEFT has A [e r, in], one expert after the other, and B [out, r e], in
    which the number of the expert changes fastest.
    """
    count = module.num_experts
    each_first = first.view(count, -1, first.shape[1])[experts]
    each_second = second.view(len(second), -1, count).permute(2, 0, 1)[experts]
    if getattr(module.get_base_layer(), "is_transposed", False):
        return each_first.transpose(1, 2), each_second.transpose(1, 2)
    return each_second, each_first


class BaseWeights(Weights):
    """Weights of the base, under the names that its tensors have with an adapter around them."""

    def __init__(self, base: Weights, *, lasting: bool, started: Weights | None = None) -> None:
        """Keep the base in memory if `lasting`, as it is read again after the engine is built.

        `started`: the values of the adapter to start from; None: it gets initial values.
        """
        self.base = base
        self._lasting = lasting
        self._started = started or NoWeights()

    def on(self, base: Weights) -> BaseWeights:
        """Return the same adapter on another base."""
        return BaseWeights(base, lasting=self._lasting, started=self._started)

    def read(self, name: str) -> torch.Tensor | None:
        if (learned := self._started.read(name)) is not None or is_adapters(name):
            return learned
        value = self.base.read(base_name(name))
        # the copy is trained and the original is not, so they must not share memory
        is_copy = f".modules_to_save.{ADAPTER}." in name
        return value.clone() if value is not None and is_copy else value

    def release(self) -> None:
        if not self._lasting:
            self.base.release()


class MergedWeights(Weights):
    """Weights of the base with an adapter merged in float32, then rounded to the base's dtype.

    A weight W becomes W + scaling x B A (LoRA, arXiv 2106.09685). With DoRA (arXiv 2402.09353),
    each row of the sum is then scaled to its length in the magnitude vector.
    """

    def __init__(self, base: Weights, model: nn.Module, adapter: SafetensorsFolder) -> None:
        """`model`: the model with the adapter. `adapter`: its values, under the model's names."""
        self.base = base
        self._model = model
        self._adapter = adapter
        copies = [name for name in adapter.renamed if not is_adapters(name)]
        self._copies = {base_name(name): name for name in copies}
        layers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
        self._layers = {adapted_weight(name, item): item for name, item in layers.items()}
        self._names = {adapted_weight(name, item): name for name, item in layers.items()}

    def on(self, base: Weights) -> MergedWeights:
        """Return the same adapter, merged into another base."""
        return MergedWeights(base, self._model, self._adapter)

    def read(self, name: str) -> torch.Tensor | None:
        if (value := self.base.read(name)) is None:
            return None
        if name in self._copies:
            return self._learned(self._copies[name]).to(value.dtype)
        if name not in self._layers:
            return value
        layer = self._layers[name]
        prefix = f"{self._names[name]}.lora_"
        first = self._learned(f"{prefix}A.{ADAPTER}.weight").float()
        second = self._learned(f"{prefix}B.{ADAPTER}.weight").float()
        turned = isinstance(layer.base_layer, Conv1D)
        merged = (value.T if turned else value).float()
        merged = merged + product(layer, first, second)
        magnitude = f"{prefix}magnitude_vector.{ADAPTER}.weight"
        if magnitude in self._adapter.renamed:
            length = torch.linalg.norm(merged, dim=1)
            merged *= (self._learned(magnitude).float() / length)[:, None]
        return (merged.T.contiguous() if turned else merged).to(value.dtype)

    def _learned(self, name: str) -> torch.Tensor:
        return self._adapter[self._adapter.renamed[name]]


def made_up(spec: ModelSpec) -> MadeWeights:
    """Return weights of a tiny copy's base: the same for every seed, and rounded to bfloat16."""

    def make() -> dict[str, torch.Tensor]:
        tensors = tensors_of(on_host(spec))
        return {name: t.detach().bfloat16().to(t.dtype) for name, t in tensors.items()}

    return MadeWeights(make)
