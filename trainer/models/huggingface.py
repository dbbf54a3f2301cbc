"""Any Hugging Face language model as a `ModelSpec`: with a head of any kind, or without one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from trainer.config.sections.model_and_data import ModelSection
from trainer.errors import ConfigError, Problem, refused
from trainer.models import language_model
from trainer.models.door import (
    BUILD_MEMORY,
    BUILD_SECONDS,
    bounded,
    opening,
)
from trainer.models.language.auto_class import CAUSAL, WITH_IMAGES, AutoClass, auto_class
from trainer.models.language.blocks import blocks_by_run, blocks_like, stated_blocks
from trainer.models.materialise import built_tensor
from trainer.models.names import aliases_of
from trainer.models.patches import correct_prefix, skip_rescaling
from trainer.models.pretrained import config_json
from trainer.models.pretrained.named_base import NamedBase, base_notes, untie, untied
from trainer.models.pretrained.reader import ConvertedWeights
from trainer.models.pretrained.whole import GENERATION, WholeBase
from trainer.models.spec import (
    Building,
    ModelFiles,
    ModelSpec,
    NoWeights,
    TinyCopies,
    Weights,
)
from trainer.models.tiny import CopySize, tiny
from trainer.models.tiny_config import KEPT, SIZES, Sizes, tiny_config


def spec_of(
    config: PreTrainedConfig,
    options: ModelSection,
    *,
    weights: bool = True,
    kind: AutoClass | None = None,
) -> ModelSpec:
    """Build the spec of an architecture, with the weights of `trainer.model.name_or_path`, if any.

    Without `weights`, none are looked for or downloaded. `kind`: transformers' auto class that
    opens the model, such as AutoModel; None: that of causal language models. Raises ConfigError for
    a model that can't be built, and for weights that can't be read or saved again.
    """
    kind = kind or auto_class(config)
    name = options.name_or_path or config.model_type
    place = f"trainer.model: {name}"
    _check_decoder(config, place)  # first, as building the model changes the config
    stated = list(getattr(config, "architectures", None) or ())
    build = _builder(config, options, kind)
    model = _first_built(build, kind, place)
    _check_router(model, place)
    notes = list(_class_notes(config, model, name, stated if options.name_or_path else []))
    base = NamedBase.opened(options) if options.name_or_path and weights else None
    given: ConvertedWeights | None = None
    if base is not None:
        given = base.weights(model)
        if alias := untied(model, given):
            model, note = _built_untied(config, build, alias, place)
            given = base.weights(model)
            notes.append(note)

    @cache
    def tiny_copy(layers: int = 3, split: int = 1, sizes: Sizes = SIZES) -> ModelSpec:
        return _tiny_copy(config, options, name, CopySize(layers, split, sizes), kind)

    spec = describe(model, name, build, given or NoWeights(), tiny_copy, kind)

    def first_blocks(layers: int) -> ModelSpec:
        kept = tiny_config(config, KEPT, range(layers), len(spec.blocks))
        return _spec_without_weights(name, _builder(kept, options, kind), kind)

    spec = _as_configured(spec, options, first_blocks, notes)
    if base is None or given is None:
        return spec
    whole = base.whole(given, model, stated) if options.keep_untrained else None
    return _of_base(spec, model, given, base.folder, whole)


def _first_built(
    build: Callable[[], PreTrainedModel], kind: AutoClass, place: str
) -> PreTrainedModel:
    """Build a model for the first time.

    Raises ConfigError for whatever the family's own code raises for the config, and for an
    architecture that transformers lacks.
    """
    known = "an architecture with a causal language model head"
    if kind not in (CAUSAL, WITH_IMAGES):
        known = f"an architecture of {kind.__name__}"
    with (
        opening(place, "a config that the family's own code builds a model of"),
        refused(place, known, ValueError, ImportError),
        bounded(BUILD_MEMORY, BUILD_SECONDS),
    ):
        return build()


def _as_configured(
    spec: ModelSpec,
    options: ModelSection,
    first_blocks: Callable[[int], ModelSpec],
    notes: Iterable[str],
) -> ModelSpec:
    """Return the spec with the attention and revision of the config, `first_blocks` and `notes`."""
    attention = replace(spec.language.attention, requested=options.attention)
    return replace(
        spec,
        language=replace(spec.language, attention=attention),
        tiny=replace(spec.tiny, first_blocks=first_blocks),
        files=replace(spec.files, revision=options.revision),
        notes=tuple(notes),
    )


def _of_base(
    spec: ModelSpec,
    model: PreTrainedModel,
    weights: ConvertedWeights,
    folder: Path,
    whole: WholeBase | None,
) -> ModelSpec:
    """Return the spec with how its base's files are saved again, and notes on them.

    `whole`: the base's folder, saved with the trained model in it; None: the model is saved alone.
    """
    save_config = partial(_save_config, model, base=folder)
    notes = base_notes(weights, model, spec.name, whole)
    files = replace(spec.files, save_config=save_config, base=whole)
    return replace(spec, files=files, notes=(*spec.notes, *notes))


def _check_decoder(config: PreTrainedConfig, place: str) -> None:
    """Raise ConfigError for an encoder-decoder model: its decoder alone would be built."""
    if getattr(config, "is_encoder_decoder", False):
        kind = type(config).__name__
        actual = f"{kind} is an encoder with a decoder, of which the decoder alone would be trained"
        hint = 'Set "is_encoder_decoder": false in its config if that is what you want.'
        raise ConfigError(Problem(place, actual, "a decoder", hint))


def _class_notes(
    config: PreTrainedConfig, model: PreTrainedModel, name: str, stated: list[str]
) -> Iterator[str]:
    """Yield a note if the class that is trained is not that of the folder or the config."""
    kind = type(model).__name__
    if stated and kind not in stated:
        yield f"{name} says that it is a {stated[0]}; a {kind} is trained"
    elif type(model.config) is not type(config):
        yield f"of {config.model_type} the text model alone is trained, a {kind}"


def _built_untied(
    config: PreTrainedConfig, build: Callable[[], PreTrainedModel], alias: str, place: str
) -> tuple[PreTrainedModel, str]:
    """Build a model with `alias` untied, as transformers loads it; return it with a note.

    Changes the config. Raises ConfigError if the model's class ties `alias` in any case.
    """
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


def _tiny_copy(
    config: PreTrainedConfig, options: ModelSection, name: str, size: CopySize, kind: AutoClass
) -> ModelSpec:
    def spec_of_tiny(small: PreTrainedConfig) -> ModelSpec:
        return _spec_without_weights(name, _builder(small, options, kind, on_cpu=True), kind)

    place = f"trainer.model: {name}"
    expected = "an architecture that can be tried out"
    # whatever the family's own code raises
    with refused(place, expected, named=True, start="no tiny copy of it runs: "):
        full = _builder(config, options, kind)()
        if not (blocks := stated_blocks(full)):
            small, _ = tiny(config, spec_of_tiny, full, (), size)
            blocks = blocks_like(full, small.blocks)
        small, lacks = tiny(config, spec_of_tiny, full, blocks, size)
    return replace(small, tiny=replace(small.tiny, lacks=lacks))


def _builder(
    config: PreTrainedConfig, options: ModelSection, kind: AutoClass, on_cpu: bool = False
) -> Callable[[], PreTrainedModel]:
    runs = options.attention in ("eager", "sdpa") or not on_cpu
    attention = {"attn_implementation": options.attention} if options.attention and runs else {}

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(
                config,
                trust_remote_code=options.trust_remote_code,
                dtype=torch.float32,
                **attention,
            )
        correct_prefix(model)
        skip_rescaling(model)
        return model

    return build


def _spec_without_weights(
    name: str, build: Callable[[], PreTrainedModel], kind: AutoClass
) -> ModelSpec:
    return describe(build(), name, build, NoWeights(), kind=kind)


def describe(
    model: nn.Module,
    name: str,
    build: Callable[[], nn.Module],
    weights: Weights,
    tiny_copy: Callable[..., ModelSpec] | None = None,
    kind: AutoClass | None = None,
) -> ModelSpec:
    """Build the spec of a model on the meta device from its blocks, head, ties and sizes.

    `kind`: as in `spec_of`.
    """
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
            opens=f"{(kind or auto_class(model.config)).__name__}.from_pretrained",
            save_config=partial(_save_config, model),
        ),
    )
    if blocks or tiny_copy:
        return spec
    blocks = blocks_by_run(spec)
    return replace(spec, blocks=blocks, language=language_model.language_of(model, blocks))


def _initialise(root: nn.Module, name: str) -> None:
    """Initialise one module by the rule of the nearest transformers model around it."""
    owner = root
    module = root
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    with guard_torch_init_functions():
        owner._init_weights(module)  # type: ignore[operator]


def _save_config(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype | None, base: Path | None = None
) -> None:
    """Write config.json of the trained class, and generation_config.json, that of `base` if any."""
    config = copy.deepcopy(model.config)
    config.update({"dtype": dtype or config.dtype, "architectures": [type(model).__name__]})
    config.save_pretrained(folder)
    if not model.can_generate():
        return
    if base is not None and (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, folder / GENERATION)
    elif model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
