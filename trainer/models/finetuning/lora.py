"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT, around the modules of a model's spec.

The base is read under its own names and kept as it is; files and checkpoints have the adapters
alone, under the names that PEFT gives them. Only linear layers within the blocks are adapted, so
that blocks stay the units that engines cut, shard and seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.errors import ConfigError, Problem, listed, refused
from trainer.models.finetuning import lora_weights
from trainer.models.finetuning.lora_experts import stacks_among
from trainer.models.finetuning.lora_folder import (
    OPENS,
    PREFIX,
    STEM,
    completed,
    opened_as,
    opened_values,
    started,
)
from trainer.models.finetuning.lora_opening import (
    Adapters,
    check_folder,
    injected,
    loadable,
    scalings_of,
)
from trainer.models.finetuning.lora_targets import (
    check_saved,
    check_stacks,
    chosen_targets,
    left_out,
)
from trainer.models.finetuning.lora_values import initialise
from trainer.models.finetuning.lora_whole import WholeNames, whole_adapter
from trainer.models.finetuning.quantised import quantised_files
from trainer.models.finetuning.quantised.quantised_base import note_of, values_of
from trainer.models.finetuning.quantised.quantised_experts import quantised
from trainer.models.finetuning.quantised.quantised_files import QuantisedLayers
from trainer.models.names import aliases_of, pattern_of
from trainer.models.patches import saved_adapter_config
from trainer.models.pretrained.weights import fingerprint
from trainer.models.spec import (
    WHOLE,
    Building,
    ModelFiles,
    ModelSpec,
    NoWeights,
    Training,
)
from trainer.storage import Json, required

if TYPE_CHECKING:
    from peft import LoraConfig

    from trainer.config.sections.adapter import AdapterSection

MODULES = ("targets", "modules_to_save")
"""The keys of `trainer.adapter` that name modules."""


def adapted(spec: ModelSpec, options: AdapterSection | None) -> ModelSpec:
    """Return the spec of the model with the adapters of `trainer.adapter`, or itself for None.

    Raises ConfigError if PEFT is not installed, for a target or module that the model does not
    have, and if the adapter in `trainer.adapter.path` does not fit.
    """
    if options is None:
        return spec
    required("peft", "trainer.adapter", "peft")
    options = completed(options)
    whole = WholeNames.of(spec.files.base)
    options = _in_the_part(options, whole)
    model = spec.build()
    targets = chosen_targets(model, spec, options.targets)
    check_stacks(model, options, targets)
    check_saved(model, spec, options.modules_to_save, targets)
    without = left_out(model, spec, options.targets, targets)
    spec = replace(spec, notes=(*spec.notes, *without))
    patterns = {pattern_of(name) for name in targets}

    @cache
    def tiny_copy(layers: int = 3, split: int = 1) -> ModelSpec:
        assert spec.tiny.copy is not None
        small = spec.tiny.copy(layers, split)
        if isinstance(small.building.weights, NoWeights):
            small = small.with_weights(lora_weights.made_up(small))
        return _with_adapters(small, options, _of_patterns(small.build(), patterns))

    described = _with_adapters(spec, options, targets)
    named = {lora_weights.base_name(name) for name, _ in model.named_parameters()}
    base = fingerprint(spec.building.weights, sorted(named)) if spec.tiny.copy else ""
    if options.path is not None:
        described = _started(described, spec, options, whole)
    copies = replace(spec.tiny, copy=tiny_copy if spec.tiny.copy else None)
    return replace(described, config={**described.config, "base": base}, tiny=copies)


def _in_the_part(options: AdapterSection, whole: WholeNames) -> AdapterSection:
    """Return the section with modules under the trained part's names.

    An adapter in a folder may have them under the names of the whole model.
    """
    if options.path is None or isinstance(options.targets, str):
        return options
    update = {key: [whole.part(name) for name in getattr(options, key)] for key in MODULES}
    return options.model_copy(update=update)


def _started(
    described: ModelSpec, base: ModelSpec, options: AdapterSection, whole: WholeNames
) -> ModelSpec:
    """Return the spec with the values of the adapter in `trainer.adapter.path`.

    Raises ConfigError if its tensors are not those that are trained.
    """
    assert options.path is not None
    folder = Path(options.path)
    parameters = described.build().named_parameters(remove_duplicate=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    published = described.files.published
    values = started(folder, shapes, (published, whole.in_files(published)))
    base_weights = base.building.weights
    weights = lora_weights.BaseWeights(base_weights, lasting=options.merge, started=values)
    notes = [f"the adapter starts as that of {folder} (trainer.adapter.path)"]
    if (of_folder := quantised_files.read(folder)) != options.quantize:
        before = quantised_files.name_of(of_folder)
        now = quantised_files.name_of(options.quantize)
        notes.append(f"that adapter was trained on a base {before}; this base is {now}")
    return replace(described.with_weights(weights), notes=(*described.notes, *notes))


def _with_adapters(spec: ModelSpec, options: AdapterSection, targets: Sequence[str]) -> ModelSpec:
    """Return the spec with adapters in the modules `targets`."""
    base = spec.build()
    stacks = stacks_among(base, targets)
    config = _peft_config(spec, options, base, [name for name in targets if name not in stacks])

    def build() -> nn.Module:
        """Put adapters into a model on the meta device; PEFT decides what is trained."""
        adapted = injected(spec.build(), config, targets)
        if options.quantize is None:
            return adapted
        return quantised(adapted, spec.blocks, quantised_files.format_of(options.quantize))

    expected = "an adapter that PEFT supports"
    with refused("trainer.adapter", expected, ValueError, TypeError, named=True):
        model = build()
    published = _published(model)
    made = scalings_of(model)
    if odd := sorted(made.keys() ^ set(targets)):
        actual = f"PEFT gives {len(made)} adapters for {len(targets)} matrices: {listed(odd)}"
        raise ConfigError(Problem("trainer.adapter.targets", actual, "one for each layer"))
    training = _training(spec, model, published)
    values = sum(values_of(model).values())
    frozen = sum(training.frozen.values())
    learned = f"{(values - frozen) / 1e6:,.2f} M values are trained"
    still = f"the other {frozen / 1e6:,.1f} M of {spec.name} are frozen"
    layers = f"{len(targets) - len(stacks)} layers"
    adapted = f"{layers} and {len(stacks)} stacks of experts" if stacks else layers
    note = f"LoRA of rank {options.r} in {adapted}: {learned}, {still}"
    head = base.get_output_embeddings()  # type: ignore[operator]
    same_head = type(model.get_output_embeddings()) is type(head)  # type: ignore[operator]
    output = replace(spec.language.head, plain=spec.language.head.plain and same_head)
    plan = _tensor_plan(spec.language.tensor_plan, targets, stacks)
    return replace(
        spec,
        building=Building(
            build,
            partial(initialise, spec),
            lora_weights.BaseWeights(spec.building.weights, lasting=options.merge),
            lambda name: spec.building.constructed(lora_weights.base_name(name)),
        ),
        parameters=values,
        language=replace(spec.language, head=output, tensor_plan=plan),
        tied=aliases_of(model),
        training=training,
        files=_files(spec, options, model, config, published),
        notes=(*spec.notes, note, *_notes_on_quantising(spec.name, model, options)),
        config={**spec.config, "adapter": _settings(options, targets)},
    )


def _of_patterns(model: nn.Module, patterns: Collection[str]) -> list[str]:
    """Return the names of a model's modules and parameters that have one of the patterns."""
    named = (*model.named_modules(), *model.named_parameters())
    return [name for name, _ in named if pattern_of(name) in patterns]


def _notes_on_quantising(base: str, model: nn.Module, options: AdapterSection) -> list[str]:
    """Return notes on what is quantised, and on a merged model, which is not."""
    if options.quantize is None:
        return []
    notes = [note_of(base, model)]
    if options.merge:
        another = "not with the quantised one, and so differs from what is trained"
        notes.append(f"final-merged/ is made with the base of the files, {another}")
    return notes


def _training(spec: ModelSpec, model: nn.Module, published: Mapping[str, str]) -> Training:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sizes = values_of(model)
    tensors = {*parameters, *dict(model.named_buffers())}
    fresh = {n for n in parameters if lora_weights.base_name(n) in spec.training.fresh}
    return replace(
        spec.training,
        frozen={name: sizes[name] for name, p in model.named_parameters() if not p.requires_grad},
        fresh=frozenset(filter(lora_weights.is_adapters, parameters)) | fresh,
        unsaved=frozenset(tensors - published.keys()),
    )


def _files(
    spec: ModelSpec,
    options: AdapterSection,
    model: nn.Module,
    config: LoraConfig,
    published: Mapping[str, str],
) -> ModelFiles:
    scalings = scalings_of(model)
    shapes = {
        published[name]: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in published
    }
    adapters = Adapters(scalings, published)
    saved = saved_adapter_config(loadable(spec.build, config, list(scalings), adapters, shapes))
    known = (published, WholeNames.of(spec.files.base).in_files(published))
    layers = QuantisedLayers.of(model, options.quantize)
    base = whole_adapter(spec.files.base, config, adapters, shapes, layers)

    def merged(folder: Path) -> ModelSpec:
        adapter = opened_values(folder, known)
        weights = lora_weights.MergedWeights(spec.building.weights, model, adapter)
        return spec.with_weights(weights)

    def save_config(folder: Path, dtype: torch.dtype | None) -> None:
        saved.save_pretrained(str(folder))
        quantised_files.write(folder, layers, spec.build)

    def check(folder: Path) -> None:
        check_folder(folder, saved, shapes)

    return replace(
        spec.files,
        published=published,
        merged=merged if options.merge else None,
        stem=STEM,
        opens=OPENS[config.task_type],
        save_config=save_config,
        check=check,
        base=base,
    )


def _peft_config(
    spec: ModelSpec, options: AdapterSection, model: nn.Module, layers: Sequence[str]
) -> LoraConfig:
    """Return PEFT's config for the linear `layers` of a base, which is built as `model`."""
    from peft import LoraConfig

    folder = Path(spec.name)
    alpha: Any = options.alpha  # PEFT takes a fraction, too
    return LoraConfig(
        r=options.r,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        lora_dropout=options.dropout,
        target_modules=list(layers),
        bias=options.bias,
        modules_to_save=list(options.modules_to_save) or None,
        use_rslora=options.rslora,
        use_dora=options.dora,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in layers),
        **opened_as(model),
        base_model_name_or_path=str(folder.resolve()) if folder.is_dir() else spec.name,
        revision=None if folder.is_dir() else spec.files.revision,
    )


def _published(model: nn.Module) -> dict[str, str]:
    """Map our names of the tensors that PEFT saves to those in its files, by PEFT's own rule."""
    from peft import get_peft_model_state_dict

    named = dict(model.named_parameters(remove_duplicate=False))
    ours = {id(parameter): name for name, parameter in named.items()}
    state = get_peft_model_state_dict(
        model, state_dict=named, adapter_name=lora_weights.ADAPTER, save_embedding_layers=False
    )
    return {ours[id(value)]: f"{PREFIX}{name}" for name, value in state.items()}


def _settings(options: AdapterSection, targets: Sequence[str]) -> Json:
    """Return the settings that must be the same when a run resumes from a checkpoint."""
    same = {key: getattr(options, key) for key in ("type", "r", "alpha", "bias", "rslora", "dora")}
    if options.quantize is not None:
        same["quantize"] = options.quantize.model_dump()
    modules = list(options.modules_to_save)
    return {**same, "targets": sorted(targets), "modules_to_save": modules}


def _tensor_plan(
    of_base: Mapping[str, str], targets: Sequence[str], stacks: Sequence[str]
) -> dict[str, str]:
    """Return the base's tensor plan with the adapters' matrices in it.

    A rowwise layer's A is split as the layer is, and a columnwise layer's B. The other matrix is
    whole, takes and gives whole vectors, and so has its whole gradient on every rank. A module of
    experts is in the plan under its name in PEFT's wrappers.
    """
    plan = {}
    wrappers = Counter(name.rpartition(".")[0] for name in stacks)
    for name, style in of_base.items():
        if name in wrappers:
            plan[name + ".base_layer" * wrappers[name]] = style
            continue
        if name not in targets:
            plan[name] = style
            continue
        rows = style.startswith("rowwise")
        plan[f"{name}.base_layer"] = style
        plan[f"{name}.lora_A.{lora_weights.ADAPTER}"] = style if rows else WHOLE
        plan[f"{name}.lora_B.{lora_weights.ADAPTER}"] = WHOLE if rows else style
    return plan
