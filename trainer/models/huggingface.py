"""Any Hugging Face causal language model as a `ModelSpec`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from trainer.errors import ConfigError, Problem, refused
from trainer.models import language_model
from trainer.models.door import (
    BUILD_MEMORY,
    BUILD_SECONDS,
    bounded,
    opening,
)
from trainer.models.language.auto_class import auto_class
from trainer.models.language.blocks import blocks_by_run, blocks_like, stated_blocks
from trainer.models.language.model_config import pretrained_config
from trainer.models.materialise import built_tensor
from trainer.models.names import aliases_of, in_short
from trainer.models.patches import correct_prefix, skip_rescaling
from trainer.models.pretrained import config_json, quantised
from trainer.models.pretrained.files import stored_tensors
from trainer.models.pretrained.reader import ConvertedWeights
from trainer.models.pretrained.whole import GENERATION, MODEL_FILES, WholeBase
from trainer.models.spec import Building, ModelFiles, ModelSpec, NoWeights, TinyCopies, Weights
from trainer.models.tiny import CopySize, tiny
from trainer.models.tiny_config import KEPT, SIZES, Sizes, tiny_config


def spec_of(config: PreTrainedConfig, options: Any, *, weights: bool = True) -> ModelSpec:
    """Build the spec of an architecture, with the weights of `trainer.model.name_or_path`, if any.

    Without `weights`, none are looked for or downloaded. Raises ConfigError for an architecture
    that can't be built.
    """
    name = options.name_or_path or config.model_type
    place = f"trainer.model: {name}"
    _check_decoder(config, place)  # before the model is built, which changes the config
    stated = list(getattr(config, "architectures", None) or ())
    build = _builder(config, options)
    fits = "a config that the family's own code builds a model of"
    known = "an architecture with a causal language model head"
    # whatever the family's own code raises for the config, and transformers for one that it lacks
    with (
        opening(place, fits),
        refused(place, known, ValueError, ImportError),
        bounded(BUILD_MEMORY, BUILD_SECONDS),
    ):
        model = build()
    _check_router(model, place)
    notes = list(_class_notes(config, model, name, stated if options.name_or_path else []))
    base: WholeBase | None = None
    given: Weights = NoWeights()
    if options.name_or_path and weights:
        given = weights_of(model, options)
        if alias := _untied(model, given):
            model, note = _built_untied(config, build, alias, place)
            given = weights_of(model, options)
            notes.append(note)
        notes += _base_notes(given, model, name, options.keep_untrained)
        if options.keep_untrained:
            base = _whole_base(given, model, stated, options)

    @cache
    def tiny_copy(layers: int = 3, split: int = 1, sizes: Sizes = SIZES) -> ModelSpec:
        return _tiny_copy(config, options, name, CopySize(layers, split, sizes))

    spec = describe(model, name, build, given, tiny_copy)

    def first_blocks(layers: int) -> ModelSpec:
        kept = tiny_config(config, KEPT, range(layers), len(spec.blocks))
        return _spec_without_weights(name, _builder(kept, options))

    files = spec.files
    if options.name_or_path and weights:
        save_config = partial(_save_config, model, base=_folder_of(options))
        files = replace(files, save_config=save_config)
    return replace(
        spec,
        tiny=replace(spec.tiny, first_blocks=first_blocks),
        files=replace(files, revision=options.revision, base=base),
        notes=tuple(notes),
    )


def _check_decoder(config: PreTrainedConfig, place: str) -> None:
    """Raise ConfigError for an encoder with a decoder: the decoder alone would be built."""
    if getattr(config, "is_encoder_decoder", False):
        kind = type(config).__name__
        actual = f"{kind} is an encoder with a decoder, of which the decoder alone would be trained"
        hint = 'Set "is_encoder_decoder": false in its config if that is what you want.'
        raise ConfigError(Problem(place, actual, "a decoder", hint))


def _class_notes(
    config: PreTrainedConfig, model: PreTrainedModel, name: str, stated: list[str]
) -> Iterator[str]:
    """Yield a note if another class is trained than the folder or the config says."""
    kind = type(model).__name__
    if stated and kind not in stated:
        yield f"{name} says that it is a {stated[0]}; a {kind} is trained and saved"
    elif type(model.config) is not type(config):
        yield f"of {config.model_type} the text model alone is trained and saved, a {kind}"


def untie(config: PreTrainedConfig) -> None:
    """Have the models of a config keep head and table apart; changes it in place."""
    for part in (config, config.get_text_config(decoder=True)):
        part.update({"tie_word_embeddings": False})


def _built_untied(
    config: PreTrainedConfig, build: Callable[[], PreTrainedModel], alias: str, place: str
) -> tuple[PreTrainedModel, str]:
    """Build a model whose `alias` is not tied, as transformers loads it; changes the config."""
    untie(config)
    model = build()
    if alias in aliases_of(model):
        actual = f"another value for {alias} than for what it is tied to"
        raise ConfigError(Problem(place, actual, "one value, as its class always ties them"))
    stored = f"its config ties {alias}, but the files have another value for it"
    return model, f"{stored}: it is not tied, as in transformers (tie_word_embeddings false)"


def _check_router(model: PreTrainedModel, place: str) -> None:
    """Raise ConfigError for a router's loss in a model without routed experts: it has no value."""
    stated = getattr(language_model.text_config(model), "output_router_logits", False)
    if stated and not language_model.routes(model):
        actual = "a router's loss (output_router_logits), and no layer with experts to route to"
        expected = "output_router_logits false, or a layer with experts"
        raise ConfigError(Problem(place, actual, expected))


def _tiny_copy(config: PreTrainedConfig, options: Any, name: str, size: CopySize) -> ModelSpec:
    def spec_of_tiny(small: Any) -> ModelSpec:
        return _spec_without_weights(name, _builder(small, options, on_cpu=True))

    place = f"trainer.model: {name}"
    expected = "an architecture that can be tried out"
    # whatever the family's own code raises
    with refused(place, expected, named=True, start="no tiny copy of it runs: "):
        full = _builder(config, options)()
        if not (blocks := stated_blocks(full)):
            small, _ = tiny(config, spec_of_tiny, full, (), size)
            blocks = blocks_like(full, small.blocks)
        small, lacks = tiny(config, spec_of_tiny, full, blocks, size)
    return replace(small, tiny=replace(small.tiny, lacks=lacks))


def _builder(
    config: PreTrainedConfig, options: Any, on_cpu: bool = False
) -> Callable[[], PreTrainedModel]:
    runs = options.attention in ("eager", "sdpa") or not on_cpu
    attention = {"attn_implementation": options.attention} if options.attention and runs else {}

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(
                config,
                trust_remote_code=options.trust_remote_code,
                dtype=torch.float32,
                **attention,
            )
        correct_prefix(model)
        skip_rescaling(model)
        return model

    return build


def _spec_without_weights(name: str, build: Callable[[], PreTrainedModel]) -> ModelSpec:
    return describe(build(), name, build, NoWeights())


def describe(
    model: nn.Module,
    name: str,
    build: Callable[[], nn.Module],
    weights: Weights,
    tiny_copy: Callable[..., ModelSpec] | None = None,
) -> ModelSpec:
    """Read a model's blocks, head, ties and sizes on the meta device."""
    assert isinstance(model, PreTrainedModel)
    blocks = stated_blocks(model)
    if not blocks and tiny_copy:
        with suppress(ConfigError):  # without a tiny copy, no blocks are known
            blocks = blocks_like(model, tiny_copy().blocks)
    spec = ModelSpec(
        name=name,
        building=Building(build, _initialise, weights, partial(built_tensor, build)),
        blocks=blocks,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        language=language_model.language_of(model, blocks),
        tied=aliases_of(model),
        tiny=TinyCopies(copy=tiny_copy),
        config=config_json.architecture(model.config),
        files=ModelFiles(
            opens=f"{auto_class(model.config).__name__}.from_pretrained",
            save_config=partial(_save_config, model),
        ),
    )
    return spec if blocks or tiny_copy else replace(spec, blocks=blocks_by_run(spec))


def _initialise(root: nn.Module, name: str) -> None:
    """Initialise one module by the rule of the nearest transformers model around it."""
    owner = root
    module = root
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    with guard_torch_init_functions():
        owner._init_weights(module)  # type: ignore[operator]


def weights_of(model: PreTrainedModel, options: Any) -> ConvertedWeights:
    """Open the weights of the folder or hub id for a model on the meta device.

    Raises ConfigError if there are none, or if they are stored in a way that cannot be read.
    """
    place = f"trainer.model.name_or_path: {options.name_or_path}"
    config = pretrained_config(options)
    quantiser = quantised.dequantiser(quantised.stored_config(config), place)
    stored = stored_tensors(_folder_of(options), config)
    return ConvertedWeights(stored, model, quantiser, place)


def _folder_of(options: Any) -> Path:
    """Return the folder of a base, downloaded if it is on the hub."""
    folder = Path(options.name_or_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, options.name_or_path, revision=options.revision)
    folder = Path(download(allow_patterns=[*MODEL_FILES, "*.safetensors"]))
    if not any(folder.glob("*.safetensors")):
        download(allow_patterns=["pytorch_model*.bin"])
    return folder


def _whole_base(
    weights: ConvertedWeights, model: PreTrainedModel, stated: list[str], options: Any
) -> WholeBase:
    """Return the base's folder as it is to be written again; `stated`: the classes that it names.

    Raises ConfigError if something of it would be lost.
    """
    kind = getattr(transformers, next(iter(stated), ""), type(model))
    config = pretrained_config(options)

    def build() -> PreTrainedModel:
        whole = pretrained_config(options)
        quantised.remove_config(whole)
        place = config_json.place_of(whole, type(model.config))
        if place is not None and not model.config.tie_word_embeddings:
            untie(whole)
        with (
            opening(f"trainer.model: {options.name_or_path}", "the class that it names"),
            bounded(BUILD_MEMORY, BUILD_SECONDS),
            torch.device("meta"),
        ):
            built: PreTrainedModel = kind(whole)
        correct_prefix(built)
        return built

    is_whole = (
        issubclass(type(model), kind) or config_json.place_of(config, type(model.config)) is None
    )
    return WholeBase(_folder_of(options), weights, model, config, None if is_whole else build)


def _untied(model: PreTrainedModel, weights: ConvertedWeights) -> str:
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


def _base_notes(
    weights: ConvertedWeights, model: PreTrainedModel, name: str, keeps: bool
) -> Iterator[str]:
    """Yield notes on how a base is stored, and on tensors that the model has no place for."""
    if method := weights.quantised_by:
        how = f"{name} is quantised by {method}: its values are dequantised as they are read"
        yield f"{how}; what is saved is not quantised, and has no quantization_config"
    if unread := weights.unread:
        kind = type(model).__name__
        shown = in_short(sorted(unread), model.state_dict().keys())
        dropped = f"{len(unread)} tensors of {name} have no place in a {kind}"
        result = "come along as they are" if keeps else "are left out"
        yield f"{dropped}: they are not trained, and {result}: {shown}"


def _save_config(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype | None, base: Path | None = None
) -> None:
    """Write the trained class's config, and how it generates: as the folder `base` says, if any."""
    config = copy.deepcopy(model.config)
    config.update({"dtype": dtype or config.dtype, "architectures": [type(model).__name__]})
    config.save_pretrained(folder)
    if base is not None and (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, folder / GENERATION)
    elif model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
