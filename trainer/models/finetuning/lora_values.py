"""The initial values of adapters, and of a base with adapters around it."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.models.finetuning import lora_weights
from trainer.models.finetuning.quantised.quantised_base import Quantised
from trainer.models.patches import has_values, mark_values
from trainer.models.spec import ModelSpec


def initialise(base: ModelSpec, root: nn.Module, name: str) -> None:
    """Initialise one module: an adapter's by PEFT's rule, any other by the base's own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    module = root.get_submodule(name)
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | nn.ModuleDict):
        return
    if isinstance(module, Quantised):
        for key in module.forms:
            if not has_values(data := module.get_parameter(key)):  # a plan has no weights to read
                mark_values(data.zero_(), given=True)
        if all(key in module.forms for key, _ in module.named_parameters(recurse=False)):
            return
    if not lora_weights.is_adapters(name):
        base.building.initialise(root, name)
        return
    own = {k: p for k, p in module.named_parameters(recurse=False) if not has_values(p)}
    if not own:
        return
    kind = next(part for part in name.split(".") if part.startswith("lora_"))
    if kind == "lora_A":
        nn.init.kaiming_uniform_(own["weight"], a=math.sqrt(5))
    elif kind == "lora_B":
        nn.init.zeros_(own["weight"])
    else:  # DoRA's magnitude is the norm of each row of the base's weight (arXiv 2402.09353)
        layer = root.get_submodule(f"{name.partition('.lora_')[0]}.base_layer")
        rows = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        own["weight"].copy_(torch.linalg.norm(rows.float(), dim=1))  # type: ignore[arg-type]
