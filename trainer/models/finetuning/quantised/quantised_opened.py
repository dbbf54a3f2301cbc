"""Trained adapters opened on their quantised base: the models that were trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from trainer.config.sections.adapter import AdapterSection, QuantizeSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.models.door import object_in
from trainer.models.finetuning.lora import adapted
from trainer.models.finetuning.lora_folder import CONFIG
from trainer.models.finetuning.lora_weights import base_name, is_adapters
from trainer.models.finetuning.quantised.quantised_base import Form
from trainer.models.finetuning.quantised.quantised_files import dequantised, forms_in, layers_of
from trainer.models.huggingface import spec_of
from trainer.models.language.auto_class import CAUSAL, class_named
from trainer.models.language.model_config import read_config
from trainer.models.materialise import CPU, Placement, materialise
from trainer.models.spec import ModelSpec


class _Opened(NamedTuple):
    model: Any
    base: Mapping[str, nn.Parameter]
    """The parameters that are the base's, by their names in it."""
    forms: Mapping[str, Form]


def opened_on_quantised(
    folders: Sequence[Path],
    bits: QuantizeSection,
    trust: bool,
    device: torch.device = CPU,
    *,
    keep: bool,
) -> list[nn.Module]:
    """Open the adapter of each folder around their one base, in evaluation mode, on a device.

    The models share the base's tensors. Weights are quantised one by one, as they are read. If
    `keep`, they stay quantised, else as what they are once dequantised: the same values. The base
    is in the dtype of its config, and the adapters in float32, as by PEFT. Raises ConfigError.
    """
    first = _opened(folders[0], bits, trust, device, keep=keep)
    others = [_opened(one, bits, trust, device, first, keep=keep) for one in folders[1:]]
    return [one.model for one in (first, *others)]


def _opened(
    folder: Path,
    bits: QuantizeSection,
    trust: bool,
    device: torch.device,
    like: _Opened | None = None,
    *,
    keep: bool,
) -> _Opened:
    """Open an adapter, on the base of `like` if there is one."""
    stated = object_in(folder / CONFIG)
    section = ModelSection(
        name_or_path=str(stated.get("base_model_name_or_path")),
        revision=stated.get("revision"),
        trust_remote_code=trust,
    )
    config = read_config(section)
    dtype = config.get_text_config(decoder=True).dtype or torch.float32
    spec = _base(folder, config, section, stated)
    described = adapted(spec, AdapterSection(path=str(folder), quantize=bits if keep else None))
    if keep:
        forms = forms_in(described.build())
    else:
        forms = layers_of(described, bits)
        described = dequantised(described, forms)
    model: Any = described.build()
    if like is not None:
        _share(model, described, forms, like)
    placement = Placement(device, torch.float32, base_dtype=dtype)
    materialise(model, described, seed=0, placement=placement)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_adapters(name):  # what PEFT keeps as the base
            parameter.data = parameter.data.to(dtype)
    if model.can_generate():
        with suppress(OSError):  # the base has none
            named = {"revision": section.revision} if section.revision else {}
            settings = GenerationConfig.from_pretrained(str(section.name_or_path), **named)
            model.generation_config.update(**settings.to_dict())
    return _Opened(model.eval(), _base_parameters(model, described), forms)


def _base_parameters(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return {base_name(name): value for name, value in named if name in spec.training.unsaved}


def _share(model: nn.Module, spec: ModelSpec, forms: Mapping[str, Form], like: _Opened) -> None:
    """Give a model on the meta device the base's tensors of another; of a weight, if its form is
    the same: a module that an adapter has a copy of is not quantised."""
    values = {
        meta: like.base[name]
        for name, meta in _base_parameters(model, spec).items()
        if name in like.base and forms.get(name) == like.forms.get(name)
    }
    for module in model.modules():
        parameters = module._parameters.items()
        module._parameters.update({k: values[one] for k, one in parameters if one in values})


def _base(
    folder: Path, config: PreTrainedConfig, section: ModelSection, stated: dict[str, Any]
) -> ModelSpec:
    """Return the base as it was trained; what the adapter has a copy of need not be in its files.

    `stated`: the adapter's own config, which names the class of a model that predicts no token.
    """
    names = [(stated.get("auto_mapping") or {}).get("base_model_class")]
    if (folder / "config.json").exists():  # of a head for labels, which the base may not have
        config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
        names += config.architectures or []
    kind = class_named(config, [name for name in names if name])
    if kind is not CAUSAL:
        section = section.model_copy(update={"keep_untrained": False})
    spec = spec_of(config, section, kind=kind)
    saved = tuple(stated.get("modules_to_save") or ())
    named = [name for name, _ in spec.build().named_parameters()]
    copied = [name for name in named if name.rpartition(".")[0].endswith(saved or ("\0",))]
    absent = {name for name in copied if spec.building.weights.read(name) is None}
    training = replace(spec.training, fresh=spec.training.fresh | absent)
    return replace(spec, training=training)
