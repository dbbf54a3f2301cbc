"""The model of the one process: with PEFT's adapter and transformers' weights, frozen and grouped
as configured.

It follows what docs/what_is_trained.md and docs/adapters.md say of `trainer.freeze`,
`trainer.parameter_groups` and `trainer.adapter`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.certify.one_process.quantising import quantised
from trainer.config import TrainerSection
from trainer.config.sections.adapter import AdapterSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.distributed.seeding import seeded_init
from trainer.models.finetuning.frozen import carried
from trainer.models.language.auto_class import class_in_folder
from trainer.models.names import pattern_of
from trainer.models.spec import ModelSpec
from trainer.probes.probe import drawn
from trainer.run.final import MERGED
from trainer.run.start.folder import FINAL

if TYPE_CHECKING:
    from peft import LoraConfig

T = TypeVar("T")


class Published(NamedTuple):
    """A trained adapter as PEFT and transformers open it: tensors by name."""

    adapted: Mapping[str, torch.Tensor]
    """The model's parameters with the adapter around the base."""
    base: Mapping[str, torch.Tensor]
    """The base's parameters; all tensors here are in float32."""
    merged: Mapping[str, torch.Tensor]
    """The base after PEFT's `merge_and_unload`."""
    ours: Mapping[str, torch.Tensor] | None
    """The parameters of the model in `final-merged/`; None if there is no such folder."""
    eps: float
    """The machine epsilon of the dtype of the files in `final-merged/`; 0 if there are none."""


class Learner(NamedTuple):
    """A module with its values, whose frozen parameters require no gradient."""

    model: nn.Module
    groups: Mapping[str, tuple[float, float | None]]
    """Parameter -> the factor of its learning rate, and its own weight decay, if any."""
    published: Callable[[Path], Published] | None = None
    """Opens the folder that a trained adapter was written to."""


def learner(
    base: nn.Module, section: TrainerSection, copied: tuple[ModelSpec, ModelSpec] | None = None
) -> Learner:
    """Prepare `base` for training, in place.

    `copied` has the specs of the config's model and of its tiny copy; None: `base` is no copy.
    """
    whole = copied[0].build() if copied else base
    model = base
    if section.adapter is not None:
        assert copied
        targets = _targets(whole, copied[0].blocks, section.adapter)
        patterns = {pattern_of(name) for name in targets}
        there = (*base.named_modules(), *base.named_parameters())
        inside = [name for name, _ in there if pattern_of(name) in patterns]
        whole = _adapted(whole, section, targets)
        model = _adapted(base, section, inside)
        if section.adapter.quantize is not None:
            quantised(model, copied[1].blocks, section.adapter.quantize)

    def of_copy(of_whole: Mapping[str, T]) -> Mapping[str, T]:
        if copied is None:
            return of_whole
        return carried(of_whole, copied[0].blocks, copied[1].blocks, model)[0]

    frozen = dict.fromkeys(_matching(whole, section.freeze), True)
    _hold(model, of_copy(frozen))
    _hold(whole, frozen)
    groups: dict[str, tuple[float, float | None]] = {}
    learned = {name for name, p in whole.named_parameters() if p.requires_grad}
    for group in section.parameter_groups:
        for name in _matching(whole, group.patterns) & learned:
            groups.setdefault(name, (group.lr_multiplier, group.weight_decay))
    return Learner(model, of_copy(groups))


def constructed(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model with the initial values that its constructor draws from `seed`."""
    with seeded_init(seed, "module"):
        return build()


def write_base(copy: ModelSpec, folder: Path) -> None:
    """Write random weights to a folder that transformers opens, in bfloat16 as most bases are."""
    model = drawn(copy)
    assert isinstance(model, PreTrainedModel)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(folder)


def opened(
    folder: Path, options: ModelSection, amend: Callable[[object], None] | None = None
) -> PreTrainedModel:
    """Load a model with transformers, in float32; `amend` changes its config."""
    from transformers import AutoConfig

    more: dict[str, object] = {"trust_remote_code": options.trust_remote_code}
    config = AutoConfig.from_pretrained(folder, **more)
    if amend is not None:
        amend(config)
    if options.attention in ("eager", "sdpa"):
        more["attn_implementation"] = options.attention
    kind = class_in_folder(config)
    return kind.from_pretrained(folder, config=config, dtype=torch.float32, **more)  # type: ignore[no-any-return]


def published(base: Path, options: ModelSection, exported: Path) -> Published:
    """Open a trained adapter, around its base and merged, with PEFT and transformers alone."""
    from peft import PeftModel
    from safetensors.torch import load_file

    def tensors(of: nn.Module) -> dict[str, torch.Tensor]:
        named = of.named_parameters(remove_duplicate=False)
        return {name.removeprefix("base_model.model."): p.detach().clone() for name, p in named}

    model = opened(base, options)
    before = tensors(model)
    merged = exported / MERGED
    whole = PeftModel.from_pretrained(model, exported / FINAL)
    adapted = tensors(whole)
    ours = tensors(opened(merged, options)) if merged.exists() else None
    stored = [value for file in merged.glob("*.safetensors") for value in load_file(file).values()]
    eps = max((torch.finfo(v.dtype).eps for v in stored if v.is_floating_point()), default=0.0)
    return Published(adapted, before, tensors(whole.merge_and_unload()), ours, eps)


def _matching(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the names of parameters that match; a tied parameter matches by any of its names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {first[id(p)] for name, p in every if any(fnmatchcase(name, of) for of in patterns)}


def _hold(model: nn.Module, names: Mapping[str, bool]) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def _targets(model: nn.Module, blocks: Sequence[str], adapter: AdapterSection) -> list[str]:
    """List the linear layers of the blocks that the adapter's targets name, and the stacks.

    Targets are all layers, ends of names of layers or, with their module, of the experts'
    parameters, or a regular expression that matches a layer's whole name.
    """
    inside = tuple(f"{block}." for block in blocks)
    linear = [n for n, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)]
    names = [n for n in linear if n.startswith(inside or "")]
    stacks = [n for n, p in model.named_parameters() if p.ndim == 3 and n.startswith(inside or "")]
    wanted: str | Collection[str] = adapter.targets
    if adapter.path:
        saved = _lora(adapter, ())
        layers = {name.removesuffix(".weight") for name in saved.target_parameters or ()}
        wanted = {*(saved.target_modules or ()), *layers}
    if wanted == "all-linear":
        return names
    if isinstance(wanted, str):
        return [name for name in names if re.fullmatch(wanted, name)]
    ends = tuple(f".{name}" for name in wanted)
    of_experts = tuple(f".{name}" for name in wanted if "." in name)
    chosen = {name for name in names if f".{name}".endswith(ends)}
    chosen.update(name for name in stacks if f".{name}".endswith(of_experts))
    chosen.update(names if "all-linear" in wanted else ())
    return [name for name in (*names, *stacks) if name in chosen]


def _adapted(model: nn.Module, section: TrainerSection, targets: Sequence[str]) -> nn.Module:
    """Add PEFT's adapter to a model, in place; each initial value has the seed of its place.

    The targets are given as names of tensors in a file, because PEFT maps some names in a config to
    other modules.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    on_meta = next(model.parameters()).is_meta
    assert section.adapter is not None
    config = _lora(section.adapter, ("by tensors",))
    modules = dict(model.named_modules())
    names: Any = {f"{name}.lora_A.weight": None for name in targets if name in modules}
    stacks = [name for name in targets if name not in modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that the config names other modules
        if names:
            inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta, state_dict=names)
        if stacks:
            kept = None if names else config.modules_to_save
            config = replace(config, target_parameters=stacks, modules_to_save=kept)
            inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    for name, module in () if on_meta else model.named_modules():
        if isinstance(module, LoraLayer):
            with seeded_init(section.seed, f"{name}.lora_A.default"):
                module.reset_lora_parameters("default", True)
    return model


def _lora(adapter: AdapterSection, targets: Sequence[str]) -> LoraConfig:
    from peft import LoraConfig

    if adapter.path:
        config = LoraConfig.from_pretrained(adapter.path)
    else:
        config = LoraConfig(
            r=adapter.r,
            lora_alpha=adapter.alpha,  # type: ignore[arg-type]
            bias=adapter.bias,
            use_dora=adapter.dora,
            use_rslora=adapter.rslora,
            modules_to_save=list(adapter.modules_to_save) or None,
        )
    return replace(
        config,
        inference_mode=False,
        lora_dropout=adapter.dropout,
        target_modules=set(targets) or config.target_modules,
        target_parameters=None if targets else config.target_parameters,
    )
